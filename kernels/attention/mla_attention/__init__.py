"""Attention over a paged latent cache (MLA)."""
