"""Renamed kernels. All readers of names that were stored or typed earlier use this module.

Stores, result files, baselines and policies are not rewritten: their readers map a former name to the present one.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

KERNELS = {
    "linear_w4a16_sm90": "linear_w4a16_decode_sm90",
    "linear_w8a16_sm90": "linear_w8a16_decode_sm90",
    "linear_w4a16_fed_sm90": "linear_w4a16_decode_ws_sm90",
    "linear_w8a16_fed_sm90": "linear_w8a16_decode_ws_sm90",
    "linear_w4a16_tma_sm90": "linear_w4a16_gemm_ws_sm90",
    "linear_w8a16_tma_sm90": "linear_w8a16_gemm_ws_sm90",
}
"""Former name -> present name."""

_FORMER = {present: former for former, present in KERNELS.items()}


def present_name(kernel: str) -> str:
    """The present name of a kernel."""
    return KERNELS.get(kernel, kernel)


def is_named(kernel: str, pattern: str) -> bool:
    """Whether a pattern (``linear_*_cpu``) names a kernel, by its present name or the one before."""
    return fnmatchcase(kernel, pattern) or (kernel in _FORMER and fnmatchcase(_FORMER[kernel], pattern))


def migrated(data: Any) -> Any:
    """JSON data with present names wherever a text or a key is a former one, alone or before a ``/``, ``[`` or blank.

    Result files have ``linear_w4a16_sm90/2`` (a kernel's third configuration) and ``linear_w4a16_sm90[depth=2,...]: reason``.
    """
    if isinstance(data, str):
        for former, present in KERNELS.items():
            if data.startswith(former) and data[len(former) : len(former) + 1] in ("", "/", "[", " "):
                return present + data[len(former) :]
        return data
    if isinstance(data, dict):
        return {migrated(key): migrated(value) for key, value in data.items()}
    if isinstance(data, list):
        return [migrated(value) for value in data]
    return data
