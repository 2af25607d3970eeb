"""Attention over dense sequences in CUDA C++ for Hopper."""
