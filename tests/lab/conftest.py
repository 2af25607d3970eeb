"""Kernels that the programs verify are verified in forks, and timed over short rotations; warm-ups freeze no heap."""

from tests.heap_is_frozen import heap_is_frozen  # noqa: F401
from tests.short_rotations import rotations_are_short  # noqa: F401
from tests.workers_as_forks import workers_are_forks  # noqa: F401
