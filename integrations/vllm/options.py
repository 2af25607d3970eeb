"""What users may tell gristmill through vLLM: ``--additional-config '{"gristmill": {"quant": "int4_g128"}}'``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.errors import UsageError

KEY = "gristmill"
TAKE = ("measured", "all")


@dataclass(frozen=True)
class Options:
    """The entry ``gristmill`` of vLLM's ``additional_config``.

    Attributes:
        quant: a scheme to quantize linear weights to at load, such as ``int4_g128``; None = as stored.
        policy: the path of a policy file; None = the one that GRISTMILL_POLICY names.
        take: linear layers of a quantized checkpoint that run on gristmill: ``measured``, those that are faster on this device than with
            vLLM's own kernels, measured at the first start; ``all`` that a kernel serves.
    """

    quant: str | None = None
    policy: str | None = None
    take: str = "measured"

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
            if name == "take" and value not in TAKE:
                raise UsageError(
                    f"additional_config[{KEY!r}]['take'] must be {' or '.join(TAKE)}, got {value!r}"
                )
            if value is not None and not isinstance(value, str):
                raise UsageError(f"additional_config[{KEY!r}][{name!r}] must be text, got {value!r}")
        return Options(**given)

    def load_policy(self) -> Policy | None:
        """The policy that is named; PolicyError if it cannot be read."""
        return None if self.policy is None else Policy.load(self.policy)
