"""Tests inside the real torchao, in its own environment: ``$(bash ci/host_env.sh torchao python) -m pytest tests/integrations/torchao``."""

from __future__ import annotations

import importlib.util

INSTALLED = importlib.util.find_spec("torchao") is not None
collect_ignore_glob = [] if INSTALLED else ["test_quantize.py"]  # test_installed.py says so
