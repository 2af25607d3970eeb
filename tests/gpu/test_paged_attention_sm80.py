"""Paged attention for sm_80 and newer on any such GPU: every example and configuration, poisoned workspaces, bits that repeat, a captured graph."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.autotune.verify import verify
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.attention.paged_attention.sm80 import _launch, more, spec
from lab.peers.groups.attention import limit
from tests.calls import make_call
from tests.gpu.test_linear_sm80 import NEWER

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not NEWER, reason="needs an NVIDIA GPU from sm_80 on")]
DEVICE, TARGET = "cuda:0", Target.parse("sm_90")
OP = default_registry().op("paged_attention")
KERNEL = default_registry().kernel("paged_attention", "paged_attention_sm80_split")
MORE = default_registry().kernel("paged_attention", "paged_attention_sm80_more_split")


@pytest.mark.parametrize("kernel", [KERNEL, MORE], ids=lambda kernel: kernel.name)
def test_every_example(kernel: Kernel) -> None:
    problems = [OP.problem(text) for text in (*kernel.examples, *map(str, OP.examples))]
    accepted = [problem for problem in problems if kernel.accepts(problem) is None]
    assert len(accepted) >= len(kernel.examples)
    for problem in accepted:
        base = kernel.config(problem, TARGET)
        steps: list[Config] = [{"keys": keys} for keys in (32, 64)] if "keys" in base else [{}]
        for ctas, step in product((base["ctas"], 5, 66, 132), steps):
            result = verify(OP, kernel, {**base, "ctas": ctas, **step}, problem, DEVICE)
            assert result.ok, (str(problem), ctas, step, result)


@pytest.mark.parametrize("dim", spec.SOURCES)
@pytest.mark.parametrize("x", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "flags",
    [
        "",
        ",window=70",
        ",sinks=true,lse=true",
        ",softcap=true,window=300,lse=true",
        ",kv=fp8,kv_scale=head,lse=true",
        ",kv=fp8,kv_scale=token,window=70,sinks=true",
        ",kv=fp8,kv_scale=token,softcap=true",
    ],
)
def test_every_head_size(dim: int, x: str, flags: str) -> None:
    for group in (1, 4, spec.most_rows(dim, "kv=fp8" in flags)):
        for seqs, longest, page in ((1, 1, 16), (3, 700, 16), (40, 257, 7), (2, 9000, 64)):
            text = (
                f"q_tokens={seqs},seqs={seqs},max_q=1,max_ctx={longest},total_ctx={seqs * (longest + 1) // 2},heads={2 * group},"
                f"kv_heads=2,head_dim={dim},block_size={page},x={x}{flags}"
            )
            problem = OP.problem(text)
            result = verify(OP, KERNEL, KERNEL.config(problem, TARGET), problem, DEVICE)
            assert result.ok, (text, result)


@pytest.mark.parametrize(
    ("kernel", "dim", "cache"),
    [
        *((KERNEL, dim, "") for dim in spec.FLASH_ROWS),
        *((MORE, dim, "") for dim in more.ROWS if dim not in spec.FLASH_ROWS),
        *((MORE, dim, f",kv=fp8,kv_scale={scale}") for dim in more.ROWS for scale in ("head", "token")),
    ],
)
@pytest.mark.parametrize("x", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "flags", ["", ",window=70", ",sinks=true,lse=true", ",softcap=true,window=1300,lse=true"]
)
def test_batches_with_prompts(kernel: Kernel, dim: int, cache: str, x: str, flags: str) -> None:
    """Prompts, chunks that end at long contexts, and decodes beside them."""
    for group in (1, 5, 8):
        for tokens, seqs, longest, context, page in (
            (257, 1, 257, 257, 16),
            (300, 7, 290, 700, 7),
            (150, 3, 140, 9000, 64),
            (2079, 32, 2048, 4096, 16),
        ):
            text = (
                f"q_tokens={tokens},seqs={seqs},max_q={longest},max_ctx={context},total_ctx={max(tokens, seqs * context // 2)},heads={2 * group},"
                f"kv_heads=2,head_dim={dim},block_size={page},x={x}{cache}{flags}"
            )
            problem = OP.problem(text)
            result = verify(OP, kernel, kernel.config(problem, TARGET), problem, DEVICE)
            assert result.error is not None and result.error <= max(result.tolerance, limit(problem)), (
                text,
                result,
            )


def test_a_graph_takes_other_lengths_and_repeats_its_bits() -> None:
    problem = OP.problem("q_tokens=9,seqs=9,max_q=1,max_ctx=3000,total_ctx=9000,heads=16,kv_heads=4")
    arguments = OP.inputs(problem, 1, DEVICE)
    config = KERNEL.config(problem, TARGET)
    size = KERNEL.workspace(problem, config)
    room = torch.full((size.bytes,), 255, dtype=torch.uint8, device=DEVICE)
    room[: spec.parts_at(int(config["ctas"]))] = 0
    arguments[12] = room
    out, lengths = torch.empty_like(arguments[0]), arguments[5]
    call = make_call("paged_attention", *arguments, out)
    _launch.launch(config, call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        _launch.launch(config, call)
    full = lengths.clone()
    for divisor in (1, 2, 5, 3000):
        lengths.copy_(full // divisor + 1).clamp_(max=full)
        eager = torch.empty_like(out)
        _launch.launch(config, call.replace(out=eager))
        for _ in range(20):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, eager), divisor
    assert not room[: spec.parts_at(int(config["ctas"]))].any(), "counters are zero after a call"
