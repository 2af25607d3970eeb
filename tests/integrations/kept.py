"""Where tests inside a host keep what the next run, also of another clone, finds again."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def beside(module: str) -> Path:
    """The folder beside a host's packages (ci/host_env.sh), which clones share: for kernels that were verified. Records of kernels name their
    code, so that a clone with another code verifies it. One in this environment where the host is not installed."""
    spec = importlib.util.find_spec(module)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(folders[0]).parent / "cache" if folders else Path(sys.prefix) / "cache"
