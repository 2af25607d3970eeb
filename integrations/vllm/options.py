"""What users may tell gristmill through vLLM: ``--additional-config '{"gristmill": {"quant": "int4_g128"}}'``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.errors import UsageError

KEY = "gristmill"
CHOICES = {"take": ("measured", "all"), "warm": ("auto", "off")}


@dataclass(frozen=True)
class Options:
    """The entry ``gristmill`` of vLLM's ``additional_config``.

    Attributes:
        quant: a scheme to quantize linear weights to at load, such as ``int4_g128``; None = as stored.
        policy: the path of a policy file; None = the one that GRISTMILL_POLICY names.
        take: linear layers and experts of a quantized checkpoint that run on gristmill: ``measured``, those that are faster on this device than with
            vLLM's own kernels, measured at the first start; ``all`` that a kernel serves.
        warm: of the worker: ``auto`` prepares every kernel, and captures decode graphs, before the first request; ``off`` does not.
    """

    quant: str | None = None
    policy: str | None = None
    take: str = "measured"
    warm: str = "auto"

    @staticmethod
    def parse(additional_config: Any) -> Options:
        """UsageError for an unknown entry, or one that is no text."""
        given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        known = [field.name for field in fields(Options)]
        if not isinstance(given, Mapping) or not given.keys() <= set(known):
            raise UsageError(
                f"additional_config[{KEY!r}] must be an object with entries of {', '.join(known)}, got {given!r}"
            )
        for name, value in given.items():
            if name in CHOICES and value not in CHOICES[name]:
                raise UsageError(
                    f"additional_config[{KEY!r}][{name!r}] must be {' or '.join(CHOICES[name])}, got {value!r}"
                )
            if value is not None and not isinstance(value, str):
                raise UsageError(f"additional_config[{KEY!r}][{name!r}] must be text, got {value!r}")
        return Options(**given)

    def load_policy(self) -> Policy | None:
        """The policy that is named; PolicyError if it cannot be read."""
        return None if self.policy is None else Policy.load(self.policy)
