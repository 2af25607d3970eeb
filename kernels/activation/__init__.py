"""Operation family: activation. Specs are found by walking this package."""
