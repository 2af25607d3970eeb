"""Layers. Each takes its parameters from the loader, binds its plan once, and runs it."""
