"""Skinny linear for AMD GPUs in HIP: every lane of a wave takes a part of K."""
