"""Tests with CuTe DSL, in its own environment: ``$(bash ci/host_env.sh cutedsl python) -m pytest tests/integrations/cutedsl``."""

from __future__ import annotations

import importlib.util

INSTALLED = importlib.util.find_spec("cutlass") is not None
NEED_IT = [
    "test_block_scaled.py",
    "test_block_scaled_ptx.py",
    "test_dense_experts_ptx.py",
    "test_experts.py",
    "test_experts_ptx.py",
    "test_linear_sm100.py",
    "test_linear_sm100_ptx.py",
    "test_programs.py",
    "test_recipe.py",
]
collect_ignore_glob = [] if INSTALLED else NEED_IT  # test_installed.py says so
