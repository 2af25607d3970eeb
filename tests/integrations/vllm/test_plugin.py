"""The entry point: twice without harm, never an exception, and clear messages for other versions and for none."""

from __future__ import annotations

import importlib.metadata
import logging
import re
import subprocess
import sys

import pytest
from vllm.engine.arg_utils import EngineArgs

from gristmill.integrations import Host, HostError
from gristmill.integrations.vllm import HOST, Admission, plugin, register
from tests.integrations.vllm.conftest import MODELS, ROOT

INSTALLED = HOST.require()


def test_the_entry_point_is_registered(environment: dict[str, str]) -> None:
    (entry,) = [
        e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "gristmill"
    ]
    assert entry.load() is register


def test_registering_twice_changes_nothing_more() -> None:
    register()
    once = EngineArgs.create_model_config
    register()
    assert EngineArgs.create_model_config is once


@pytest.mark.parametrize(
    "worker,names", [(plugin.WORKER, ["gristmill.integrations.vllm:Admission"]), ("auto", None)]
)
def test_only_our_worker_has_its_admission(worker: str, names: list[str] | None) -> None:
    register()
    arguments = EngineArgs(str(MODELS / "docs-llama"), worker_cls=worker)
    for _ in range(2):
        assert arguments.create_model_config().logits_processors == names


@pytest.mark.parametrize("minimum,below", [("99.0", "100.0"), ("0.1", "0.2")])
def test_another_version_is_one_warning(
    minimum: str, below: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "HOST", Host("vLLM", ("vllm",), minimum, below))
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    register()
    # vLLM's handlers may give a record to the root twice.
    (message,) = {record.message for record in caplog.records if "gristmill" in record.message}
    assert f"gristmill serves vLLM >={minimum},<{below}, and vllm {INSTALLED}" in message


def test_an_error_stays_inside(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise SystemError("planted")

    monkeypatch.setattr(plugin, "_admit", broken)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    register()
    assert "SystemError: planted" in caplog.text


def test_admission_belongs_to_our_worker() -> None:
    with pytest.raises(RuntimeError, match="leave it out of --logits-processors"):
        Admission(None, None, False)


def test_importing_the_package_imports_no_host() -> None:
    code = "import sys, gristmill.integrations.vllm; assert not {'vllm', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / "src")})


def test_another_version_is_refused_by_the_worker_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from gristmill.integrations.vllm import worker

    monkeypatch.setattr(worker, "HOST", Host("vLLM", ("vllm",), "99.0", "100.0"))
    with pytest.raises(HostError, match=f"and vllm {re.escape(INSTALLED)} is installed"):
        worker.Worker(None)
