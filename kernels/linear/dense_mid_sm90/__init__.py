"""Operation family: linear with dense weights on one kind of device. Specs are found by walking this package."""
