"""Linear over block-scaled codes of weights and activations in Triton, by `tl.dot_scaled`."""
