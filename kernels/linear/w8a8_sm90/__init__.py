"""Products of 8-bit weights and 8-bit activations on Hopper: e4m3 and int8 operands straight from shared memory."""
