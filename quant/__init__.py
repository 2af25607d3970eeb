"""Number formats, QuantTensor, layouts, quantizers and reference dequantization."""
