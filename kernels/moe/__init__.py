"""Operation family: moe. Specs are found by walking this package."""
