"""Operation family: attention. Specs are found by walking this package."""
