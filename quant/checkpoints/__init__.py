"""Models on disk: safetensors directories and GGUF files, and the declaration of what a model's parameters are made of."""
