"""Kernels that examples of the pages verify are verified in forks."""

from tests.workers_as_forks import workers_are_forks  # noqa: F401
