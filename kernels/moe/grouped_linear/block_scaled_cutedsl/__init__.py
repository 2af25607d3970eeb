"""Products of experts over block-scaled codes of weights and activations in CuTe DSL, by tcgen05 with block scales."""
