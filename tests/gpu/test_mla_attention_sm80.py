"""Latent attention for sm_80 and newer on any such GPU: every example and configuration, pages and heads, bits that repeat, a captured graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.autotune.verify import verify
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.attention.mla_attention.sm80 import _launch, spec
from tests.calls import make_call
from tests.gpu.test_linear_sm80 import NEWER

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not NEWER, reason="needs an NVIDIA GPU from sm_80 on")]
DEVICE, TARGET = "cuda:0", Target.parse("sm_90")
OP = default_registry().op("mla_attention")
CUT, WHOLE = spec.KERNELS
MIXES = (  # q_tokens, seqs, max_q, max_ctx, total_ctx
    (1, 1, 1, 1, 1),
    (1, 1, 1, 9000, 9000),
    (5, 7, 1, 300, 900),
    (12, 3, 4, 257, 700),
    (67, 5, 33, 190, 600),
    (64, 64, 1, 700, 30000),
)


def text_of(mix: tuple[int, ...], heads: int, flags: str = "") -> str:
    axes = zip(("q_tokens", "seqs", "max_q", "max_ctx", "total_ctx"), mix, strict=True)
    return ",".join(f"{name}={value}" for name, value in axes) + f",heads={heads}{flags}"


@pytest.mark.parametrize("kernel", spec.KERNELS, ids=lambda kernel: kernel.name)
def test_every_example(kernel: Any) -> None:
    problems = [OP.problem(text) for text in (*kernel.examples, *map(str, OP.examples), *map(str, OP.bench))]
    accepted = [problem for problem in problems if kernel.accepts(problem) is None]
    assert len(accepted) >= len(kernel.examples)
    for problem in accepted:
        base = kernel.config(problem, TARGET)
        for change in ({}, {"ctas": 5}, {"ctas": 66, "resident": 1}, {"least": 1}, {"least": 8}):
            result = verify(OP, kernel, {**base, **change}, problem, DEVICE)
            assert result.ok, (str(problem), change, result)


@pytest.mark.parametrize("page", [1, 7, 16, 24, 64])
@pytest.mark.parametrize("heads", [1, 8, 16, 20, 64, 128])
@pytest.mark.parametrize("x", ["bf16", "fp16"])
def test_pages_and_heads(x: str, heads: int, page: int) -> None:
    for mix in MIXES:
        for kernel in spec.KERNELS:
            problem = OP.problem(text_of(mix, heads, f",block_size={page},x={x},lse=true"))
            result = verify(OP, kernel, kernel.config(problem, TARGET), problem, DEVICE)
            assert result.ok, (str(problem), kernel.name, result)


@pytest.mark.parametrize("scale", [-0.05, 0.0, 0.3])
def test_scales(scale: float) -> None:
    problem = OP.problem(text_of((9, 3, 4, 500, 900), 16))
    arguments = OP.inputs(problem, 3, DEVICE)
    arguments[7] = scale
    out = torch.empty(9, 16, 512, dtype=torch.bfloat16, device=DEVICE)
    _launch.launch(CUT.config(problem, TARGET), make_call("mla_attention", *arguments, out))
    error = OP.error(problem, arguments, [out], [OP.reference(*arguments[:10])])
    assert error < OP.tolerance(problem).limit


def test_a_row_is_the_same_in_any_batch() -> None:
    problem = OP.problem(text_of((33, 5, 15, 700, 2000), 40))
    config = WHOLE.config(problem, TARGET)
    arguments = OP.inputs(problem, 1, DEVICE)
    expected = torch.empty(33, 40, 512, dtype=torch.bfloat16, device=DEVICE)
    _launch.launch(config, make_call("mla_attention", *arguments, expected))
    begin, contexts = arguments[3].tolist(), arguments[4].tolist()
    for index, context in enumerate(contexts):
        rows = slice(begin[index], begin[index + 1])
        count = rows.stop - rows.start
        if count == 0:
            continue
        single = list(arguments)
        single[0], single[2] = arguments[0][rows], arguments[2][index : index + 1]
        single[3] = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
        single[4] = torch.tensor([context], dtype=torch.int32, device=DEVICE)
        single[5] = count
        out = torch.empty_like(expected[rows])
        _launch.launch(config, make_call("mla_attention", *single, out))
        assert torch.equal(out, expected[rows]), index


@pytest.mark.parametrize(("heads", "max_q"), [(16, 1), (128, 2)])
def test_a_graph_takes_other_lengths_and_repeats_its_bits(heads: int, max_q: int) -> None:
    problem = OP.problem(text_of((9, 9, max_q, 3000, 9000), heads))
    arguments = OP.inputs(problem, 1, DEVICE)
    config = CUT.config(problem, TARGET)
    size = CUT.workspace(problem, config).bytes
    arguments[10] = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
    out, lengths = torch.empty(9, heads, 512, dtype=torch.bfloat16, device=DEVICE), arguments[4]
    call = make_call("mla_attention", *arguments, out)
    _launch.launch(config, call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        _launch.launch(config, call)
    full = lengths.clone()
    for divisor in (1, 2, 5, 3000):
        lengths.copy_(full // divisor + max_q).clamp_(max=full)
        eager = torch.empty_like(out)
        _launch.launch(config, call.replace(out=eager))
        expected = OP.reference(*arguments[:10])
        assert OP.error(problem, arguments, [eager], [expected]) < OP.tolerance(problem).limit
        for _ in range(20):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, eager), divisor
