"""Operation family: linear. Specs are found by walking this package."""
