"""linear_fp32: its definition and kernels."""
