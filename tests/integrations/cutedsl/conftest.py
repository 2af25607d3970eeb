"""Tests with CuTe DSL, in its own environment: ``$(bash ci/host_env.sh cutedsl python) -m pytest tests/integrations/cutedsl``."""

from __future__ import annotations

import importlib.util

INSTALLED = importlib.util.find_spec("cutlass") is not None
collect_ignore_glob = [] if INSTALLED else ["test_programs.py", "test_recipe.py"]  # test_installed.py says so
