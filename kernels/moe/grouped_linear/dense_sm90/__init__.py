"""Products of experts over dense weights in CUDA C++ for Hopper."""
