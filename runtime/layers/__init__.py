"""Layers: each takes its parameters from the loader, asks for its plan once, and runs it."""
