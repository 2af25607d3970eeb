"""Experts of 8-bit weights and activations on Hopper: the tiles of linear_a8/w8a8_sm90 over rows sorted by expert."""
