"""Operation family: norm. Specs are found by walking this package."""
