"""Paged attention in CUDA C++ for Hopper."""
