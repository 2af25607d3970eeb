"""Peers, a file each. vLLM's kernels are called as vLLM 0.24 calls them for its layers; results are checked at every run."""
