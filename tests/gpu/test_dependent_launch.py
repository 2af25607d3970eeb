"""Chains of kernels in Triton and CUDA C++ that start while the one ahead of them runs: the bits of calls one by one, on a stream, in graphs, on two
streams. What a kernel reads too early is poison."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gristmill.autotune.captures import capturing
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.load import load
from gristmill.quant import pack, quantize
from tests.calls import make_call
from tests.conftest import HAS_GPU

NEW = HAS_GPU and torch.cuda.get_device_capability() >= (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not NEW, reason="needs a GPU with programmatic dependent launch (sm_90 or newer)"),
]
DEVICE = "cuda:0"
N, LAYERS = 2048, 6
Wait = Callable[[], object]


def nothing() -> None:
    """What lies between two kernels of a chain."""


class Layers:
    """`LAYERS` times: norm with residual, product, gate, product, norm with codes beside; each buffer is written once and poisoned before."""

    def __init__(self, rows: int, seed: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, device=DEVICE, generator=generator).bfloat16()

        self.rows, self.start = rows, draw(rows, N)
        self.big, self.weight = draw(4096, N), 1 + draw(N) / 8
        self.up = draw(2 * N, N) / N**0.5
        self.quantized = quantize(draw(N, N).float() / N**0.5, "int4_g128")
        self.packed = pack(self.quantized, "w4_frag16_v1").tensors
        wide = rows, 2 * N
        self.x = [torch.empty(rows, N, device=DEVICE).bfloat16() for _ in range(LAYERS + 1)]
        self.residual = torch.empty_like(self.x[0])
        self.normed, self.gated = ([torch.empty_like(self.residual) for _ in range(LAYERS)] for _ in range(2))
        self.inner = [torch.empty(wide, device=DEVICE).bfloat16() for _ in range(LAYERS)]

    def run(self, op: str, kernel: str, problem: str, *arguments: object) -> None:
        spec = default_registry().kernel(op, kernel)
        config = spec.config(default_registry().op(op).problem(problem), Target.parse("sm_90"))
        load(spec)(config, make_call(op, *arguments))

    def __call__(self, wait: Wait) -> list[Tensor]:
        """All outputs, of one run; `wait` follows every kernel."""
        for buffer in (*self.x, *self.normed, *self.gated, *self.inner):
            buffer.fill_(float("nan"))
        self.residual.copy_(self.start)
        # Ahead of the chain something slow, whose result the chain reads.
        slow = self.big @ self.big.T
        self.x[0].copy_(self.start * (1 + slow[: self.rows, :1] * 0))
        wait()
        m = f"m={self.rows}"
        for i in range(LAYERS):
            self.run(
                "fused_add_rms_norm",
                "fused_add_rms_norm_triton",
                f"{m},n={N}",
                *(self.x[i], self.residual, self.weight, 1e-6, self.normed[i]),
            )
            wait()
            torch.mm(self.normed[i], self.up.T, out=self.inner[i])
            wait()
            self.run("silu_and_mul", "silu_and_mul_triton", f"{m},n={N}", self.inner[i], self.gated[i])
            wait()
            self.run(
                "linear",
                "linear_w4a16_gemm_ws_sm90",
                f"{m},n={N},k={N},w=int4_g128",
                *(self.gated[i], self.packed, None, None, False, N, None, self.x[i + 1]),
            )
            wait()
        return [*self.x, *self.normed, *self.gated, *self.inner, self.residual]


def hopper_only() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the product between Triton's kernels is one of Hopper's")


@pytest.mark.parametrize("rows", [1, 7, 64, 257])
def test_a_chain_on_a_stream(rows: int) -> None:
    hopper_only()
    layers = Layers(rows, rows)
    expected = [out.clone() for out in layers(torch.cuda.synchronize)]
    assert all(bool(out.isfinite().all()) for out in expected)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(100):
        with torch.cuda.stream(stream):
            actual = layers(nothing)
        stream.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("rows", [1, 64, 257])
def test_a_chain_in_a_graph(rows: int) -> None:
    """Replays follow each other without a pause."""
    hopper_only()
    layers = Layers(rows, 100 + rows)
    expected = [out.clone() for out in layers(torch.cuda.synchronize)]
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        actual = layers(nothing)
    for repeats in (1, 2, 50):
        for _ in range(repeats):
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_chains_on_two_streams_at_once() -> None:
    hopper_only()
    both = [Layers(rows, 200 + rows) for rows in (16, 128)]
    expected = [[out.clone() for out in layers(torch.cuda.synchronize)] for layers in both]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(50):
        for layers, stream in zip(both, streams, strict=True):
            with torch.cuda.stream(stream):
                layers(nothing)
    torch.cuda.synchronize()
    for layers, wanted in zip(both, expected, strict=True):
        outs = [*layers.x, *layers.normed, *layers.gated, *layers.inner, layers.residual]
        assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))


def test_kernels_of_triton_alone() -> None:
    """Norm after norm, in place of each other's inputs: each reads what the one ahead has just written, and writes what it has just read."""
    weight = (1 + torch.rand(N, device=DEVICE)).bfloat16()
    start = torch.randn(300, N, device=DEVICE).bfloat16()
    spec = default_registry().kernel("rms_norm", "rms_norm_triton")
    config = spec.config(default_registry().op("rms_norm").problem(f"m=300,n={N}"), Target.parse("sm_90"))
    launch = load(spec)

    def chain(wait: Wait) -> list[Tensor]:
        two, results = [start.clone(), torch.full_like(start, float("nan"))], []
        for i in range(40):
            launch(config, make_call("rms_norm", two[i % 2], weight, 1e-6, two[1 - i % 2]))
            wait()
            if i % 8 == 7:
                results.append(two[1 - i % 2].clone())
        return results

    expected = chain(torch.cuda.synchronize)
    assert all(bool(one.isfinite().all()) for one in expected)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(chain(nothing), expected, strict=True))
