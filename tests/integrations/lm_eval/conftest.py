"""Tests inside the real harness, in its own environment: ``$(bash ci/host_env.sh lm_eval python) -m pytest tests/integrations/lm_eval``."""

from __future__ import annotations

import importlib.util
import os

from tests.patient_clients import clients_are_patient  # noqa: F401

INSTALLED = importlib.util.find_spec("lm_eval") is not None
collect_ignore_glob = [] if INSTALLED else ["test_[!i]*.py"]  # test_installed.py says so

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
