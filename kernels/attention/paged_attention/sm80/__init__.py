"""Paged attention on sm_80 and newer: decode by mma.sync and cp.async."""
