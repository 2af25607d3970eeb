"""Timing, verification, and the writing side of the store."""
