"""Kernels that examples of the pages verify are verified in forks, and timed over short rotations."""

from tests.short_rotations import rotations_are_short  # noqa: F401
from tests.workers_as_forks import workers_are_forks  # noqa: F401
