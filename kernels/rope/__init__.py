"""Operation family: rope. Specs are found by walking this package."""
