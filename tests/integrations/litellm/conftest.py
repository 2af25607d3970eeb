"""Tests of the server by LiteLLM, in its own environment: ``$(bash ci/host_env.sh litellm python) -m pytest tests/integrations/litellm``."""

from __future__ import annotations

import importlib.util
import os

from tests.patient_clients import clients_are_patient  # noqa: F401

INSTALLED = importlib.util.find_spec("litellm") is not None
collect_ignore_glob = [] if INSTALLED else ["test_[!i]*.py"]  # test_installed.py says so

os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True", HF_HUB_OFFLINE="1")
