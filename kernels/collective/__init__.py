"""Operation family: collective. Operations that several ranks call together. Specs are found by walking this package."""
