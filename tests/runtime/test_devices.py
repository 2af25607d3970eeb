"""``device="auto"``: the first GPU that kernels run on, else the CPU, said in one line. GPUs are a fake probe's."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from gristmill.autotune import device as devices_here
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.target import Target
from gristmill.kernel_registry.targets.probe import Probe
from gristmill.runtime import devices
from gristmill.runtime.devices import auto_device, parse_device
from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_transfer.prefill_decode import PrefillDecode
from gristmill.runtime.llm import LLM
from gristmill.runtime.parallel.replicas import Replicas
from tests.runtime.oracle import MODELS

LLAMA = MODELS / "docs-llama"
CODES = ["sm_80", "sm_90", "sm_120"]
FakeGpus = Callable[..., Policy]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> FakeGpus:
    """Makes a machine with these GPUs, of which torch sees `seen` and is built for `codes`. Returns a policy with resolvers of its own."""

    def make(*names: str, seen: int | None = None, codes: list[str] = CODES, **options: object) -> Policy:
        targets = tuple(Target.parse(name) for name in names)
        count = len(targets) if seen is None else seen
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: codes)
        monkeypatch.setattr(devices_here, "_devices", lambda: targets)
        monkeypatch.setattr(devices, "probe_devices", lambda: Probe(targets))
        return Policy(cache=policy.cache, **options)  # type: ignore[arg-type]

    return make


def test_the_first_gpu_that_kernels_run_on(gpus: FakeGpus) -> None:
    device, line = auto_device(gpus("h200", "h100"))
    assert device == torch.device("cuda:0") and line == "cuda:0 (NVIDIA H200)"
    assert parse_device("auto", gpus("h200")) == torch.device("cuda:0")
    device, line = auto_device(gpus("v100", "h100"))
    assert device == torch.device("cuda:1")
    assert line.startswith("cuda:1 (NVIDIA H100") and "not cuda:0: torch" in line
    assert "is built for sm_80, sm_90, sm_120, not for sm_70" in line


def test_else_the_cpu_and_why(gpus: FakeGpus) -> None:
    cases: list[tuple[Callable[[], Policy], str]] = [
        (lambda: gpus(), f"the CPU; torch {torch.__version__} sees no CUDA device"),
        (lambda: gpus("h200", seen=0), "although this machine has NVIDIA H200"),
        (lambda: gpus("h200", codes=["sm_80"]), "is built for sm_80, not for sm_90"),
        (lambda: gpus(seen=1), "not cuda:0: device cuda:0: this machine has 0 such accelerator(s)"),
        (
            lambda: gpus("h200", exclude=("paged_*_triton*", "paged_*_sm90*", "paged_*_sm80*")),
            "runs paged_attention on sm_90",
        ),
    ]
    for make, why in cases:
        device, line = auto_device(make())
        assert device == torch.device("cpu") and line.startswith("the CPU; ") and why in line


def test_a_model_runs_there_and_a_line_says_so(
    gpus: FakeGpus,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    policy = gpus()
    with caplog.at_level(logging.INFO, "gristmill"):
        llm = LLM(LLAMA, policy=policy, num_blocks=8, warm="off")
    assert llm.model.plans.device == torch.device("cpu")
    assert [r.getMessage() for r in caplog.records if "device auto" in r.getMessage()] == [
        f"device auto: the CPU; torch {torch.__version__} sees no CUDA device"
    ]
    monkeypatch.setattr(devices.LOG, "hasHandlers", lambda: False)  # a program that has not set up logging
    capsys.readouterr()
    parse_device("auto", policy)
    assert capsys.readouterr().err.startswith("gristmill: device auto: the CPU; ")


def test_ranks_and_replicas_decide_once(gpus: FakeGpus, caplog: pytest.LogCaptureFixture) -> None:
    policy = gpus("h200")
    with caplog.at_level(logging.INFO, "gristmill"):
        with pytest.raises(
            UsageError, match="needs 2 CUDA devices; torch sees 1; device='cpu' has all ranks on the CPU"
        ):
            LLM(LLAMA, policy=policy, tensor_parallel=2)
        with pytest.raises(UsageError, match="4 replicas need 1 GPUs each, 1 are free; device='cpu'"):
            Replicas(LLAMA, 4, policy=policy)
        with pytest.raises(UsageError, match="2 replicas need 1 GPUs each, 1 are free"):
            PrefillDecode(LLAMA, "shm:a:1MiB", prefill=2, policy=policy)
    assert [r.getMessage() for r in caplog.records] == ["device auto: cuda:0 (NVIDIA H200)"] * 3
