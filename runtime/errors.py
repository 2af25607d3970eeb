"""The exceptions of the runtime. Each message says what was expected, what was given, and what to do."""

from __future__ import annotations


class UsageError(ValueError):
    """An invalid request, option or input of the caller."""


class ConfigError(UsageError):
    """A model directory whose configuration is missing, unreadable or not supported."""


class CheckpointError(UsageError):
    """Weights that are missing, damaged, of the wrong shape or dtype, or left over."""


class RankError(RuntimeError):
    """A process of `tensor_parallel` died, failed or missed its deadline; the message names it. All of them were ended. The engine's
    requests ended with them; the next one starts them again, with an empty cache."""


class ReplicaError(RuntimeError):
    """A process of `Replicas` died, failed or gave no sign of life; the message names it. Its requests ended, or were run again."""
