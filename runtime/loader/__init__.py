"""From a model on disk to a configuration and parameters: Hugging Face directories, GGUF files, quantization at load."""
