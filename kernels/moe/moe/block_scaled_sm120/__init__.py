"""Mixtures of experts with block-scaled weights and activations by mma.sync with .block_scale, for sm_120 and sm_121."""
