"""The program that times weight-only linear, as far as it runs without a GPU: its arguments and its verdicts."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store
from gristmill.quant.packed import LayoutError
from lab import gpu_graphs, kernel_timing
from lab import linear_weight_only as program
from lab.marlin import MARLIN


def samples(**us: float) -> dict[str, list[float]]:
    return {name: [value] * 11 for name, value in us.items()}


@pytest.mark.parametrize(
    ("m", "scheme", "ours", "peer", "floor", "met"),
    [
        (16, "int4_g128", 10.0, 15.0, 1.0, True),
        (16, "int4_g128", 10.1, 15.0, 1.0, False),
        (16, "int4_g128", 10.1, 15.0, 8.6, True),  # 0.85 of the floor's speed is sufficient
        (128, "int4_g128", 10.0, 12.0, 1.0, True),
        (129, "int4_g128", 10.0, 10.0, 1.0, True),
        (129, "int4_g128", 10.1, 10.0, 1.0, False),
        (129, "nvfp4", 11.2, 10.0, 1.0, True),
        (129, "nvfp4", 11.3, 10.0, 1.0, False),
    ],
)
def test_the_bar(m: int, scheme: str, ours: float, peer: float, floor: float, met: bool) -> None:
    judgement = program.verdict(samples(a=ours, b=ours + 1, p=peer, q=peer + 1), {"a", "b"}, m, scheme, floor)
    assert judgement["met"] is met
    assert judgement["best"] == "a" and judgement["peer"] == "p"


def test_clocks_that_fall_in_the_middle_do_not_decide() -> None:
    """Both take 10 % longer from some round on. By medians alone, the one that slows down a round earlier
    would lose."""
    samples_of = {"ours": [100.0] * 5 + [110.0] * 6, "peer": [100.5] * 6 + [110.5] * 5}
    judgement = program.verdict(samples_of, {"ours"}, 1024, "int4_g128", 1.0)
    assert judgement["bar_us"] == 100.5 and judgement["met"]
    low, ratio, high = judgement["over_peer"]
    # The round between the two steps is left out.
    assert [low, ratio, high] == pytest.approx([0.995] * 3, abs=1e-3)
    slower = {"ours": [102.0] * 11, "peer": [100.0] * 11}
    assert not program.verdict(slower, {"ours"}, 1024, "int4_g128", 1.0)["met"]


def test_without_peers_nothing_is_judged() -> None:
    assert program.verdict(samples(a=1.0), {"a"}, 1, "int8_ch", 0.0) == {"bar_us": None, "met": None}


def test_what_it_is_asked() -> None:
    options = program.arguments().parse_args(["--out", "found.json"])
    assert options.x == "bf16" and not options.tuned and not options.isolated
    assert program.shapes_of("table") == program.TABLE and len(program.shapes_of("all")) == 16
    assert program.shapes_of("96x128,5x7") == ((96, 128), (5, 7))
    with pytest.raises(SystemExit):
        program.arguments().parse_args([])


class Calls:
    """Stands in for CUDA graphs on a CPU: calls run one after the other, and take as many microseconds as
    their graph has calls."""

    def __init__(self) -> None:
        self.timed: dict[str, Any] = {}

    def add(self, name: str, calls: list[Any]) -> None:
        self.timed[name] = calls

    def settle(self, seconds: float) -> None: ...

    def samples(self, rounds: int) -> dict[str, list[float]]:
        for calls in self.timed.values():
            for call in calls:
                call()
        return {
            name: [len(calls) * (1.0 if name == "links" else 2.0)] * rounds
            for name, calls in self.timed.items()
        }


def test_a_whole_run_with_the_kernels_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
) -> None:
    for module in (program, gpu_graphs):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_graphs, "COLD", 1 << 18)
    monkeypatch.setattr(program, "Graphs", Calls)
    monkeypatch.setattr(kernel_timing, "environment", dict)
    out, store = tmp_path / "found.json", tmp_path / "store.json"
    expected = [
        "--out",
        str(out),
        "--store",
        str(store),
        "--schemes",
        "int4_g128",
        "--shapes",
        "96x256",
        "--m",
        "1,20",
        "--rounds",
        "3",
        "--kernels",
        "linear_cpu,linear_torch",
    ]
    times = tmp_path / "times.json"
    monkeypatch.setattr(
        sys, "argv", ["linear_weight_only", *expected, "--isolated", "--tuned", "--times", str(times)]
    )
    assert program.main() == 0
    tried = json.loads(times.read_text())["rows"]
    assert {row["kernel"] for row in tried} == {"linear_cpu"} and all(row["us"] > 0 for row in tried)
    assert {row["problem"].split(",")[0] for row in tried} == {"m=1", "m=20"} and tried[0]["config"]
    written = json.loads(out.read_text())
    assert written["refused"]["linear_torch"].startswith("multiplies dense weights")
    (weight,) = written["rows"]
    assert weight["floor_us"] > 0 and weight["floor_how"] in ("sum", "dot")
    assert [*weight["m"]] == ["1", "20"]
    for row in weight["m"].values():
        assert row["best"].startswith("linear_") and row["peer"] == program.CUBLAS
        candidates = {written["names"][place]: rest for place, *rest in row["candidates"]}
        assert {row["best"], row["isolated_best"], program.CUBLAS} <= candidates.keys()
        us, low, high, error, _, isolated_us, *_ = candidates[row["best"]]
        assert 0 < low <= us <= high and isolated_us > 0 and candidates[program.CUBLAS][3] < error * 10
        assert row["isolated_met"] in (True, False)
    kernels = {timing.kernel for timing in Store.read(store).timings}
    assert kernels == {"linear_cpu"}
    assert "bars met: " in capsys.readouterr().out
    monkeypatch.setattr(
        sys, "argv", ["linear_weight_only", *expected, "--alone", "--kernels", "linear_torch"]
    )
    with pytest.raises(RuntimeError, match="no registered kernel runs"):
        program.main()


def vllm_modules(monkeypatch: pytest.MonkeyPatch, wrong: float = 1.0) -> None:
    """Stands in for vLLM: its Marlin, in plain torch, over words that are not repacked."""

    def gptq_marlin_repack(
        words: torch.Tensor, perm: torch.Tensor, k: int, n: int, bits: int
    ) -> torch.Tensor:
        assert words.shape == (k // 8, n) and words.dtype == torch.int32 and not perm.numel() and bits == 4
        return words

    def marlin_permute_scales(scales: torch.Tensor, k: int, n: int, group: int) -> torch.Tensor:
        assert scales.shape == (k // group, n)
        return scales

    def marlin_gemm(
        x: torch.Tensor,
        out: torch.Tensor,
        words: torch.Tensor,
        bias: None,
        scales: torch.Tensor,
        *rest: Any,
    ) -> torch.Tensor:
        assert rest[:5] == (None,) * 5 and rest[6:] == ("uint4b8", *x.shape[:1], out.shape[1], x.shape[1]) + (
            True,
            False,
            True,
            False,
        )
        codes = torch.stack([words >> 4 * i & 15 for i in range(8)], 1).reshape(-1, words.shape[1]) - 8
        w = codes * scales.float().repeat_interleave(x.shape[1] // scales.shape[0], 0)
        return out.copy_(x.float() @ w * wrong)

    utilities = "vllm.model_executor.layers.quantization.utils.marlin_utils"
    contents: dict[str, dict[str, Any]] = {
        "vllm": {
            "_custom_ops": SimpleNamespace(gptq_marlin_repack=gptq_marlin_repack, marlin_gemm=marlin_gemm)
        },
        "vllm.scalar_type": {"scalar_types": SimpleNamespace(uint4b8="uint4b8")},
        utilities: {"marlin_permute_scales": marlin_permute_scales},
    }
    parts = utilities.split(".")
    for name in (*(".".join(parts[:i]) for i in range(1, len(parts))), *contents):
        module = ModuleType(name)
        module.__dict__.update(contents.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("wrong", [1.0, 1.1])
def test_beside_marlin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: float) -> None:
    for module in (program, gpu_graphs):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_graphs, "COLD", 1 << 18)
    monkeypatch.setattr(program, "Graphs", Calls)
    monkeypatch.setattr(kernel_timing, "environment", dict)
    vllm_modules(monkeypatch, wrong)
    out = tmp_path / "found.json"
    text = f"--schemes int4_g128,int4_g64_zp --shapes 96x256 --m 17 --rounds 3 --kernels linear_cpu --alone --marlin --out {out}"
    monkeypatch.setattr(sys, "argv", ["linear_weight_only", *text.split()])
    assert program.main() == 0
    written = json.loads(out.read_text())
    rows = [weight["m"]["17"] for weight in written["rows"]]
    names = [[written["names"][candidate[0]] for candidate in row["candidates"]] for row in rows]
    assert names == [[MARLIN, "linear_cpu"] if wrong == 1.0 else ["linear_cpu"], ["linear_cpu"]]
    if wrong == 1.0:
        assert rows[0]["peer"] == MARLIN
    assert "symmetric" in written["refused"][MARLIN] or "wrong" in written["refused"][MARLIN]


def test_a_kernel_whose_layouts_do_not_take_the_scheme_is_refused_by_name() -> None:
    """The refusal is no error of the program: such a kernel is a row of `refused`."""
    shape = object.__new__(program.Shape)
    shape.scheme, shape.registry = "fp8_block", default_registry()
    with pytest.raises(LayoutError, match="no layout of linear_w4a16_decode_sm90 takes fp8_block"):
        shape.weights(shape.registry.kernel("linear", "linear_w4a16_decode_sm90"))


def test_what_a_graph_writes_to_lives_as_long_as_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_graphs, "DEVICE", "cpu")

    def add(graphs: gpu_graphs.Graphs, name: str) -> weakref.ref[torch.Tensor]:
        space = torch.zeros(3)
        graphs.add(name, [lambda: space.add_(1)])
        return weakref.ref(space)

    graphs = gpu_graphs.Graphs()
    first, second = add(graphs, "a"), add(graphs, "b")
    gc.collect()
    assert first() is not None and second() is not None
    del graphs
    gc.collect()
    assert first() is None and second() is None
