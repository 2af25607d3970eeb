"""Linear in CuTe DSL for data-centre Blackwell (tcgen05): dense weights, and FP8 weights with FP8 activations."""
