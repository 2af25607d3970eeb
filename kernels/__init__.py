"""Operations and their implementations, one folder per family. Specs are found by walking this package."""
