"""Products of 8-bit weights and activations by mma.sync on NVIDIA GPUs: int8 from sm_80 on, e4m3 from sm_89 on."""
