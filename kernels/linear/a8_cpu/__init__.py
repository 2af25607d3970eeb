"""Operation family: linear with activations of 8 bits. Specs are found by walking this package."""
