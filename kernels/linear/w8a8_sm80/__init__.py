"""Products of int8 weights and int8 activations by mma.sync and cp.async, for every NVIDIA GPU from sm_80 on."""
