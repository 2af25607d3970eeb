"""Kernels are timed over short rotations."""

from tests.short_rotations import rotations_are_short  # noqa: F401
