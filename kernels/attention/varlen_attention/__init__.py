"""Causal attention over dense sequences."""
