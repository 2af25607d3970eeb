"""Latent attention in CUDA C++ for Hopper."""
