"""Operation family: sampling. Specs are found by walking this package."""
