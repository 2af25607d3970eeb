"""From a Hugging Face directory to a configuration and tensors: config.json, safetensors, quantization at load."""
