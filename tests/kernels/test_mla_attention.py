"""MLA, absorbed and not: the references against transformers' DeepSeek-V3, planted faults, batch invariance."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gristmill.autotune.metrics import error_of
from gristmill.autotune.verify import run_reference
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernels.attention.mla_attention import op as mla_attention
from gristmill.kernels.attention.mla_attention.cpu import KERNEL as MLA_CPP
from gristmill.kernels.attention.mla_attention.torch import KERNEL as MLA_TORCH
from gristmill.kernels.attention.varlen_attention import op as varlen_attention
from gristmill.kernels.attention.varlen_attention.cpu import KERNEL as VARLEN_CPP
from gristmill.kernels.attention.varlen_attention.torch import KERNEL as VARLEN_TORCH
from tests.calls import make_call
from tests.native.levels import runnable_levels

WINDOWS = ("window_left", "window_right")
LEVELS = [level for level in runnable_levels() if level in ("base", "avx2", "avx512", "neon")]


class Latents:
    """Stands in for transformers' cache and records what would be cached."""

    def update(
        self, latent: torch.Tensor, rope: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.rows = torch.cat((latent, rope), -1)[0, 0]
        return latent, rope


def deepseek(tokens: int) -> tuple[Any, Latents, dict[str, Any]]:
    """Runs a small random DeepSeek-V3 attention on `tokens` tokens. Returns the module, its latents, and a
    dict of q, k, v, scale and out."""
    from transformers import AttentionInterface
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as model
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

    recorded: dict[str, Any] = {}

    def keep(module: Any, q: Any, k: Any, v: Any, mask: Any, **rest: Any) -> Any:
        actual = model.eager_attention_forward(module, q, k, v, mask, **rest)
        recorded.update(
            q=q[0].transpose(0, 1),
            k=k[0].transpose(0, 1),
            v=v[0].transpose(0, 1),
            out=actual[0][0],
            scale=rest["scaling"],
        )
        return actual

    AttentionInterface.register("keep", keep)
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=96,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        qk_nope_head_dim=24,
        v_head_dim=40,
        num_hidden_layers=1,
        max_position_embeddings=128,
    )
    config._attn_implementation = "keep"
    attention = model.DeepseekV3Attention(config, 0).eval()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    hidden, latents = torch.randn(1, tokens, 96), Latents()
    places = model.DeepseekV3RotaryEmbedding(config)(hidden, torch.arange(tokens)[None])
    mask = torch.full((tokens, tokens), -math.inf).triu(1)[None, None]
    with torch.no_grad():
        attention(hidden, places, mask, past_key_values=latents)
    return attention, latents, recorded


@pytest.mark.parametrize("new", [1, 5, 21])
def test_absorbed_and_unabsorbed_match_deepseek(new: int) -> None:
    """For the last `new` of 21 tokens, both operations agree with transformers, which computes un-absorbed."""
    module, latents, recorded = deepseek(21)
    expected, q = recorded["out"][-new:], recorded["q"][-new:].contiguous()
    starts, contexts = torch.tensor([0, new], dtype=torch.int32), torch.tensor([0, 21], dtype=torch.int32)
    plain = varlen_attention.reference(
        q,
        recorded["k"].contiguous(),
        recorded["v"].contiguous(),
        starts,
        contexts,
        new,
        21,
        recorded["scale"],
    )
    torch.testing.assert_close(plain, expected, rtol=1e-4, atol=1e-5)

    up = module.kv_b_proj.weight.detach().view(4, 24 + 40, 64)
    absorbed = torch.cat((torch.einsum("thn,hnl->thl", q[..., :24], up[:, :24]), q[..., 24:]), -1)
    cache = torch.full((4, 8, 80), math.nan)
    order = torch.tensor([2, 0, 3])
    for place, block in enumerate(order):
        rows = latents.rows[place * 8 : place * 8 + 8]
        cache[block, : len(rows)] = rows
    table = order[None].to(torch.int32)
    for run in (mla_attention.reference, _cpp_mla):
        actual = run(
            absorbed,
            cache,
            table,
            starts,
            torch.tensor([21], dtype=torch.int32),
            new,
            21,
            recorded["scale"],
            64,
        )
        torch.testing.assert_close(
            torch.einsum("thl,hvl->thv", actual, up[:, 24:]), expected, rtol=1e-4, atol=2e-5
        )


def _cpp_mla(*arguments: Any) -> torch.Tensor:
    out = torch.empty(*arguments[0].shape[:2], 64)
    MLA_CPP.load()({"level": LEVELS[-1]}, make_call("mla_attention", *arguments, None, None, out))
    return out


def run(op: Op, kernel: Kernel, config: dict[str, Any], arguments: dict[str, Any]) -> list[torch.Tensor]:
    arguments = dict(arguments)
    if arguments["lse"] is not None:
        arguments["lse"] = torch.full_like(arguments["lse"], math.nan)
    shape, dtype = op.like(*arguments.values())[0]
    out = torch.full(shape, math.nan, dtype=dtype)
    kernel.load()(config, op.Call(*arguments.values(), out))
    return [out] if arguments["lse"] is None else [out, arguments["lse"]]


def arguments_of(op: Op, text: str) -> dict[str, Any]:
    return dict(zip([p.name for p in op.parameters], op.inputs(op.problem(text), 0, "cpu"), strict=True))


def rope_ignored(a: dict[str, Any]) -> None:
    a["q"] = a["q"].clone()
    a["q"][..., a["latent_dim"] :] = 0


def latent_slot_off_by_one(a: dict[str, Any]) -> None:
    a["cache"] = a["cache"].flatten(0, 1).nan_to_num().roll(1, 0).view(a["cache"].shape)


def own_key_missed(a: dict[str, Any]) -> None:
    a["seq_lens"] = (a["seq_lens"] - 1).clamp_min(1)


def values_shifted(a: dict[str, Any]) -> None:
    """Planted fault: the value is read one element late in the row."""
    a["cache"], a["q"] = a["cache"].roll(-1, -1), a["q"].roll(-1, -1)


def heads_swapped(a: dict[str, Any]) -> None:
    a["q"] = a["q"].flip(1)


def context_late(a: dict[str, Any]) -> None:
    a["context_start"] = (a["context_start"] + 1).clamp_max(a["context_start"][-1])


def wrong_key_head(a: dict[str, Any]) -> None:
    a["k"] = a["k"].flip(1)


def left_wider(a: dict[str, Any]) -> None:
    if a["window_left"] >= 0:
        a["window_left"] += 1


def right_wider(a: dict[str, Any]) -> None:
    a["window_right"] += a["window_right"] >= 0


def right_narrower(a: dict[str, Any]) -> None:
    a["window_right"] = max(0, a["window_right"] - 1) if a["window_right"] >= 0 else 200


FAULTS: list[tuple[Op, Kernel, Callable[[dict[str, Any]], None]]] = [
    *(
        (mla_attention.OP, MLA_TORCH, fault)
        for fault in (rope_ignored, latent_slot_off_by_one, own_key_missed, values_shifted, heads_swapped)
    ),
    *((varlen_attention.OP, VARLEN_TORCH, fault) for fault in (context_late, wrong_key_head)),
]


@pytest.mark.parametrize(("op", "kernel", "fault"), FAULTS, ids=lambda x: getattr(x, "__name__", ""))
def test_planted_fault_is_caught(op: Op, kernel: Kernel, fault: Callable[[dict[str, Any]], None]) -> None:
    for text in op.examples:
        problem, right = op.problem(text), arguments_of(op, text)
        if not problem.integer("q_tokens") or (fault is wrong_key_head and problem["kv_heads"] == 1):
            continue
        if fault is context_late and (problem["seqs"] == 1 or problem["total_ctx"] == problem["q_tokens"]):
            continue
        expected, limit = run_reference(op, list(right.values())), op.tolerance(problem).limit
        assert error_of(op, problem, list(right.values()), run(op, kernel, {}, right), expected) <= limit
        wrong = dict(right)
        fault(wrong)
        actual = [x.nan_to_num() for x in run(op, kernel, {}, wrong)]
        assert not error_of(op, problem, list(right.values()), actual, expected) <= 4 * limit, (
            f"{fault.__name__} passes {text}"
        )


@pytest.mark.parametrize("level", LEVELS)
def test_cpu_results_do_not_depend_on_batch_or_threads(level: str) -> None:
    text = "q_tokens=7,seqs=4,max_q=4,max_ctx=1200,total_ctx=2500,heads=40,latent_dim=48,rope_dim=16,lse=true"
    problem, a = mla_attention.OP.problem(text), arguments_of(mla_attention.OP, text)
    before, runs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            runs.append(run(mla_attention.OP, MLA_CPP, {"level": level}, a))
        assert all(torch.equal(x, y) for other in runs[1:] for x, y in zip(runs[0], other, strict=True))
        begin = a["query_start"].tolist()
        for i in range(len(begin) - 1):
            rows = slice(begin[i], begin[i + 1])
            single = dict(
                a,
                q=a["q"][rows],
                block_table=a["block_table"][i : i + 1],
                seq_lens=a["seq_lens"][i : i + 1],
                query_start=torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
                lse=a["lse"][rows],
            )
            for x, y in zip(runs[0], run(mla_attention.OP, MLA_CPP, {"level": level}, single), strict=True):
                assert torch.equal(x[rows], y)
    finally:
        torch.set_num_threads(before)
    expected = run_reference(mla_attention.OP, list(a.values()))
    assert (
        error_of(mla_attention.OP, problem, list(a.values()), runs[0], expected)
        <= mla_attention.OP.tolerance(problem).limit
    )


def test_describe_refuses() -> None:
    a = arguments_of(mla_attention.OP, mla_attention.OP.examples[1])
    mla_attention.OP.describe(**a)
    for change, kind, message in (
        (
            {"cache": a["cache"][..., :64]},
            ValueError,
            r"cache must be .* = \[\d+, 64, 576\], .*rope_dim as in q, got",
        ),
        ({"cache": a["cache"].float()}, TypeError, "cache must have q's dtype"),
        (
            {"latent_dim": 600},
            ValueError,
            "q must be .* with rope_dim at least 0 where latent_dim is 600, got",
        ),
        ({"max_ctx": 10**6}, ValueError, "max_ctx 1000000 is more than"),
    ):
        with pytest.raises(kind, match=message):
            mla_attention.OP.describe(**(a | change))
    b = arguments_of(varlen_attention.OP, varlen_attention.OP.examples[1])
    varlen_attention.OP.describe(**b)
    for change, kind, message in (
        ({"v": b["v"][:-1]}, ValueError, "v must be .*total_ctx as in k"),
        ({"k": b["k"].half()}, TypeError, "k must have q's dtype"),
        ({"context_start": b["context_start"][:-1]}, ValueError, "context_start"),
        ({"max_ctx": 1}, ValueError, "more than 3 sequences"),
        ({"window_left": -2}, ValueError, "window_left must be at least -1, got -2"),
        ({"window_right": -2}, ValueError, "window_right must be at least -1, got -2"),
        ({"window_right": 2**63 - 1}, ValueError, "window_right must be at most 2147483647"),
    ):
        with pytest.raises(kind, match=message):
            varlen_attention.OP.describe(**(b | change))


@pytest.mark.parametrize("left", [-1, 0, 3, 40, varlen_attention.LONGEST])
@pytest.mark.parametrize("right", [-1, 0, 2, 40, varlen_attention.LONGEST])
def test_windows_match_masks_of_torch(left: int, right: int) -> None:
    """The reference and every kernel here beside torch's own attention under a mask, for sequences of 1, 7 and 70 new tokens, with and without
    a context before them."""
    op = varlen_attention.OP
    problem = op.problem(
        "q_tokens=78,seqs=3,max_q=70,max_ctx=70,total_ctx=120,heads=4,kv_heads=2,qk_dim=32,v_dim=24,x=fp32,"
        f"window_left={left},window_right={right}"
    )
    a = dict(zip([p.name for p in op.parameters], op.inputs(problem, 3, "cpu"), strict=True))
    starts, contexts = a["query_start"].tolist(), a["context_start"].tolist()
    pieces = []
    for i in range(3):
        q = a["q"][starts[i] : starts[i + 1]].transpose(0, 1)
        k, v = (a[n][contexts[i] : contexts[i + 1]].transpose(0, 1).repeat_interleave(2, 0) for n in "kv")
        place = torch.arange(k.shape[1])
        behind = place[k.shape[1] - q.shape[1] :, None] - place
        seen = ((left < 0) | (behind <= left)) & ((right < 0) | (-behind <= right))
        pieces.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=a["scale"]))
    expected = torch.cat([piece.transpose(0, 1) for piece in pieces])
    torch.testing.assert_close(op.reference(*a.values()), expected, rtol=1e-5, atol=1e-5)
    for kernel, config in ((VARLEN_TORCH, {}), *((VARLEN_CPP, {"level": level}) for level in LEVELS)):
        torch.testing.assert_close(run(op, kernel, config, a)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fault", [left_wider, right_wider, right_narrower])
def test_a_wrong_window_is_caught(fault: Callable[[dict[str, Any]], None]) -> None:
    op, caught = varlen_attention.OP, 0
    for text in op.examples:
        problem, right = op.problem(text), arguments_of(op, text)
        wrong = dict(right)
        fault(wrong)
        if problem.text("x") != "fp32" or [wrong[n] for n in WINDOWS] == [right[n] for n in WINDOWS]:
            continue
        expected = run_reference(op, list(right.values()))
        actual = [x.nan_to_num() for x in run(op, VARLEN_TORCH, {}, wrong)]
        caught += (
            not error_of(op, problem, list(right.values()), actual, expected)
            <= 4 * op.tolerance(problem).limit
        )
    assert caught


def test_cpu_kernels_refuse_indices_that_do_not_exist() -> None:
    b = arguments_of(varlen_attention.OP, varlen_attention.OP.examples[2])
    for name in ("context_start", "query_start"):
        wrong = b | {name: b[name] + 1}
        with pytest.raises(ValueError, match="varlen_attention"):
            run(varlen_attention.OP, VARLEN_CPP, {"level": LEVELS[-1]}, wrong)
