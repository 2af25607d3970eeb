"""What a user gets wrong: an argument, a configuration, a checkpoint. Each message says what was expected, what was given, and what to do."""

from __future__ import annotations


class UsageError(ValueError):
    """An invalid request, option or input of the caller."""


class ConfigError(UsageError):
    """A model directory whose configuration is missing, unreadable or not supported."""


class CheckpointError(UsageError):
    """Weights that are missing, damaged, of the wrong shape or dtype, or left over."""
