"""Peak memory of quantizing while loading, counted exactly: the memory of all live tensors after every torch
operation."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gristmill.kernel_registry.policy import Policy
from gristmill.quant import memory
from gristmill.quant.checkpoints import weights
from gristmill.quant.checkpoints.safetensors import SafetensorsCheckpoint
from gristmill.runtime.loader.load import load_model
from lab import loading_memory

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
MOE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 1024,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
SMALL: dict[str, dict[str, Any]] = {
    "dense": {"architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 4096, **HEADS},
    "experts": {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True, **MOE, **HEADS},
    "stacked": {"architectures": ["GptOssForCausalLM"], **MOE, **HEADS},
}


class Live(TorchDispatchMode):
    """Counts the bytes of memory that torch allocated in this mode and that is still referenced, and their
    maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: dict[int, list[int]] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().resizable():
                storage = tensor.untyped_storage()
                count = self.holders.setdefault(storage._cdata, [storage.nbytes(), 0])
                if not count[1]:
                    self.now += count[0]
                count[1] += 1
                weakref.finalize(tensor, self.dropped, storage._cdata)
        self.most = max(self.most, self.now)
        return result

    def dropped(self, key: int) -> None:
        count = self.holders[key]
        count[1] -= 1
        if not count[1]:
            self.now -= count[0]
            del self.holders[key]


def beside(folder: Path, scheme: str, policy: Policy) -> tuple[int, int]:
    """Returns (bytes above the loaded model's at the peak, bytes of the two largest tensors of the checkpoint
    or the model)."""
    load_model(folder, quant=scheme, policy=policy)
    with Live() as live:
        model = load_model(folder, quant=scheme, policy=policy)
    sizes = [
        e.dtype.itemsize * torch.Size(e.shape).numel() for e in SafetensorsCheckpoint(folder).entries.values()
    ]
    sizes += [t.nbytes for t in {t.data_ptr(): t for t in model.plans.owned}.values()]
    assert live.now >= model.plans.weight_bytes  # every tensor of the model was counted
    return live.most - model.plans.weight_bytes, sum(sorted(sizes)[-2:])


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    monkeypatch.setattr(loading_memory, "KINDS", SMALL)
    monkeypatch.setattr(memory, "BLOCK", 1 << 18)  # the rest of a block counts as memory here, touched or not

    def make(kind: str) -> Path:
        loading_memory.synthesize(kind, tmp_path, 40_000_000)
        return tmp_path

    return make


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy(cache=str(tmp_path_factory.mktemp("cache")))


CASES = [("dense", "int4_g128"), ("dense", "fp8_block"), ("experts", "int4_g128"), ("stacked", "mxfp4")]


@pytest.mark.parametrize(("kind", "scheme"), CASES)
def test_one_tensor_at_a_time(kind: str, scheme: str, write: Callable[[str], Path], policy: Policy) -> None:
    most, allowed = beside(write(kind), scheme, policy)
    assert most <= allowed, f"{most / 1e6:.1f} MB beside the model, allowed {allowed / 1e6:.1f}"


def test_a_tensor_too_many_is_seen(
    write: Callable[[str], Path], policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: three float weights are held while parts are quantized, one more than the bar allows."""
    clones: list[torch.Tensor] = []
    real = weights.quantize_part

    def greedy(name: str, tensor: torch.Tensor, scheme: Any) -> Any:
        clones[:] = [*clones[-2:], tensor.clone()]
        return real(name, tensor, scheme)

    monkeypatch.setattr(weights, "quantize_part", greedy)
    most, allowed = beside(write("dense"), "int4_g128", policy)
    assert most > allowed


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_file: Callable[..., Path]
) -> None:
    policy_file()
    monkeypatch.setattr(loading_memory, "KINDS", SMALL)
    monkeypatch.setattr(loading_memory, "SCHEMES", {"dense": ("int4_g128",)})
    out = tmp_path / "out.json"
    arguments = ["--gigabytes", "0.02", "--kind", "dense", "--folder", str(tmp_path), "--out", str(out)]
    result = CliRunner().invoke(loading_memory.main, arguments, catch_exceptions=False)
    (row,) = json.loads(out.read_text())["rows"]
    assert (
        result.exit_code == 0 and row["peak"] > row["final"] / 2 and row["two_largest"] == 2 * 4096 * 1024 * 2
    )
