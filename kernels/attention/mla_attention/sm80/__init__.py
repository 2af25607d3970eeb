"""Latent attention on sm_80 and newer, by mma.sync and cp.async."""
