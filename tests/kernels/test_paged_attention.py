"""Paged attention: its reference against independent oracles, planted faults, batch invariance, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.autotune.metrics import error_of
from gristmill.autotune.verify import run_reference
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.attention.lengths import lengths
from gristmill.kernels.attention.paged_attention.cpu import KERNEL as CPP
from gristmill.kernels.attention.paged_attention.op import OP
from gristmill.kernels.attention.paged_attention.torch import KERNEL as TORCH
from tests.calls import make_call
from tests.native.levels import runnable_levels

NAMES = [parameter.name for parameter in OP.parameters]


def arguments_of(text: str, seed: int = 0) -> tuple[Problem, dict[str, Any]]:
    problem = OP.problem(text)
    return problem, dict(zip(NAMES, OP.inputs(problem, seed, "cpu"), strict=True))


def run(launcher: Callable[..., None], config: dict[str, Any], a: dict[str, Any]) -> list[torch.Tensor]:
    a = dict(a)
    if a["lse"] is not None:
        a["lse"] = torch.full_like(a["lse"], math.nan)
    out = torch.full(a["q"].shape, math.nan, dtype=a["q"].dtype)
    launcher(config, make_call("paged_attention", *a.values(), out))
    return [out] if a["lse"] is None else [out, a["lse"]]


def cpp(a: dict[str, Any], level: str | None = None) -> list[torch.Tensor]:
    return run(
        CPP.load(),
        {"level": level or [x for x in runnable_levels() if x in ("base", "avx2", "avx512", "neon")][-1]},
        a,
    )


def by_hand(a: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Computes attention token by token in float64, straight from the definition."""
    q, keys, values = (a[name].double().numpy() for name in ("q", "k_cache", "v_cache"))
    if a["k_scale"] is not None:
        keys, values = (
            keys * a["k_scale"].double().numpy()[..., None],
            values * a["v_scale"].double().numpy()[..., None],
        )
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    table, begin, context = a["block_table"].numpy(), a["query_start"].numpy(), a["seq_lens"].numpy()
    size, group = keys.shape[1], q.shape[1] // keys.shape[2]
    for i in range(len(context)):
        for t in range(begin[i], begin[i + 1]):
            p = context[i] - (begin[i + 1] - t)
            first = max(0, p - a["window"] + 1) if a["window"] > 0 else 0
            for h in range(q.shape[1]):
                where = [(table[i, s // size], s % size, h // group) for s in range(first, p + 1)]
                scores = np.array([q[t, h] @ keys[w] for w in where]) * a["scale"]
                if a["softcap"]:
                    scores = a["softcap"] * np.tanh(scores / a["softcap"])
                terms = scores if a["sinks"] is None else np.append(scores, float(a["sinks"][h]))
                lse[t, h] = terms.max() + np.log(np.exp(terms - terms.max()).sum())
                out[t, h] = sum(np.exp(s - lse[t, h]) * values[w] for s, w in zip(scores, where, strict=True))
    return out, lse


@pytest.mark.parametrize("text", OP.examples)
def test_reference_matches_float64(text: str) -> None:
    _, a = arguments_of(text)
    a["lse"] = torch.empty(a["q"].shape[:2])
    out, lse = by_hand(a)
    results = OP.reference(**a)
    half_ulp = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}[results.dtype]
    assert np.allclose(results.double().numpy(), out, rtol=half_ulp, atol=3e-6)
    assert np.allclose(a["lse"].numpy(), lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [0, 7])
def test_reference_matches_transformers(sinks: bool, window: int) -> None:
    """The reference agrees with the eager attention of Llama, and of gpt-oss with sinks, under transformers'
    own causal mask."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss
    from transformers.models.llama.modeling_llama import eager_attention_forward as llama

    _, a = arguments_of(
        f"q_tokens=19,seqs=3,max_q=9,max_ctx=30,total_ctx=60,heads=6,kv_heads=2,head_dim=64,x=fp32,window={window},"
        f"sinks={str(sinks).lower()}"
    )
    results = OP.reference(**a)
    begin, size = a["query_start"].tolist(), a["k_cache"].shape[1]
    for i, context in enumerate(a["seq_lens"].tolist()):
        count = begin[i + 1] - begin[i]
        if count == 0:
            continue
        at = torch.arange(context)
        slots = a["block_table"][i, at // size].long(), at % size
        keys, values = a["k_cache"][slots].transpose(0, 1)[None], a["v_cache"][slots].transpose(0, 1)[None]
        queries = torch.arange(context - count, context)[:, None]
        hidden = (at > queries) | ((at <= queries - window) if window else torch.zeros(1, dtype=torch.bool))
        mask = torch.zeros(count, context).masked_fill(hidden, -math.inf)[None, None]
        module = torch.nn.Module()
        module.num_key_value_groups, module.sinks, module.training = 3, a["sinks"], False
        q = a["q"][begin[i] : begin[i + 1]].transpose(0, 1)[None]
        expected, _ = (gpt_oss if sinks else llama)(
            module, q, keys, values, mask, scaling=a["scale"], dropout=0.0
        )
        torch.testing.assert_close(results[begin[i] : begin[i + 1]], expected[0], rtol=2e-5, atol=2e-6)


def without_nan(x: torch.Tensor) -> torch.Tensor:
    """Returns x with zeros in place of NaN, also for codes."""
    return torch.where(x.float().isnan(), 0.0, x.float()).to(x.dtype)


def readable(a: dict[str, Any]) -> None:
    """Blocks that no sequence owns are zeroed, so that a wrong read gives wrong numbers instead of NaN."""
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        a[name] = None if a[name] is None else without_nan(a[name])


# Planted faults. Each changes the arguments or the result of a correct kernel as a wrong kernel would, on
# examples that must notice.


def slot_off_by_one(a: dict[str, Any]) -> None:
    readable(a)
    for name in ("k_cache", "v_cache"):
        a[name] = a[name].flatten(0, 1).roll(1, 0).view(a[name].shape)


def wrong_block(a: dict[str, Any]) -> None:
    """The longest context starts in a block of another sequence."""
    readable(a)
    longest = int((a["seq_lens"] * (a["query_start"].diff() > 0)).argmax())
    a["block_table"] = a["block_table"].clone()
    a["block_table"][longest] = (a["block_table"][longest] + 1) % a["k_cache"].shape[0]


def skipped_tail_block(a: dict[str, Any]) -> None:
    """The last, partly filled block of every context is not read."""
    size = a["k_cache"].shape[1]
    for i, context in enumerate(a["seq_lens"].tolist()):
        if context > size:
            tail = a["block_table"][i, (context - 1) // size]
            for name in ("k_cache", "v_cache"):
                a[name] = a[name].clone()
                a[name][tail.long()] = 0.0


def mask_off_by_one(a: dict[str, Any]) -> None:
    """Each query also misses its own key."""
    a["seq_lens"] = (a["seq_lens"] - 1).clamp_min(1)


def window_one_more(a: dict[str, Any]) -> None:
    a["window"] += 1


def window_one_less(a: dict[str, Any]) -> None:
    a["window"] -= 1


def no_sinks(a: dict[str, Any]) -> None:
    a["sinks"] = None


def no_softcap(a: dict[str, Any]) -> None:
    a["softcap"] = 0.0


def softcap_of_another_layer(a: dict[str, Any]) -> None:
    a["softcap"] *= 1.2


def wrong_head_mapping(a: dict[str, Any]) -> None:
    """Query head h reads KV head h % kv_heads instead of h // group."""
    group = a["q"].shape[1] // a["k_cache"].shape[2]
    a["q"] = a["q"].unflatten(1, (group, -1)).transpose(1, 2).flatten(1, 2)


def neighbours_rows(a: dict[str, Any]) -> None:
    """Every sequence starts one token late."""
    a["query_start"] = (a["query_start"] + 1).clamp_max(a["q"].shape[0])


def scale_forgotten(a: dict[str, Any]) -> None:
    a["scale"] = 1.0


def scales_swapped(a: dict[str, Any]) -> None:
    a["k_scale"], a["v_scale"] = a["v_scale"], a["k_scale"]


def neighbours_head_scale(name: str, a: dict[str, Any]) -> None:
    """The last head has the scale of the head before it."""
    a[name] = a[name].clone()
    a[name][..., -1] = a[name][..., -2]


def neighbours_token_scale(name: str, a: dict[str, Any]) -> None:
    """The first token of the longest context has the scale of the token after it."""
    block = a["block_table"][int((a["seq_lens"] * (a["query_start"].diff() > 0)).argmax()), 0].long()
    a[name] = a[name].clone()
    a[name][block, 0] = a[name][block, 1] * 1.5


def neighbours_k_head_scale(a: dict[str, Any]) -> None:
    neighbours_head_scale("k_scale", a)


def neighbours_v_head_scale(a: dict[str, Any]) -> None:
    neighbours_head_scale("v_scale", a)


def neighbours_v_token_scale(a: dict[str, Any]) -> None:
    neighbours_token_scale("v_scale", a)


FAULTS: list[tuple[Callable[[dict[str, Any]], None], Callable[[Problem], bool]]] = [
    (slot_off_by_one, lambda p: True),
    (wrong_block, lambda p: p.integer("max_ctx") > 1),
    (skipped_tail_block, lambda p: p.integer("max_ctx") > 32),
    (mask_off_by_one, lambda p: p.integer("max_ctx") > 1),
    (window_one_more, lambda p: p.integer("window") > 0),
    (window_one_less, lambda p: p.integer("window") > 0),
    (no_sinks, lambda p: bool(p["sinks"])),
    (no_softcap, lambda p: bool(p["softcap"])),
    (softcap_of_another_layer, lambda p: bool(p["softcap"])),
    (wrong_head_mapping, lambda p: 1 < p.integer("kv_heads") < p.integer("heads")),
    (neighbours_rows, lambda p: True),
    (scale_forgotten, lambda p: p.integer("max_ctx") > 1),
    (scales_swapped, lambda p: p["kv"] == "fp8"),
    (neighbours_k_head_scale, lambda p: p["kv"] == "fp8"),
    (neighbours_v_head_scale, lambda p: p["kv"] == "fp8"),
    (
        neighbours_v_token_scale,
        lambda p: p["kv_scale"] == "token" and not p.integer("window") and p.integer("max_ctx") < 100,
    ),
]


def figure(problem: Problem, right: dict[str, Any], actual: list[torch.Tensor]) -> float:
    return error_of(OP, problem, list(right.values()), actual, run_reference(OP, list(right.values())))


@pytest.mark.parametrize(("fault", "applies"), FAULTS, ids=lambda f: getattr(f, "__name__", ""))
def test_planted_fault_is_caught(
    fault: Callable[[dict[str, Any]], None], applies: Callable[[Problem], bool]
) -> None:
    """With the fault, every example that it concerns, and the problem that verifies a plan, are far over the
    tolerance."""
    torch_kernel = default_registry().kernel("paged_attention", TORCH.name)
    texts = [
        t
        for t in OP.test_problems(torch_kernel)
        if OP.problem(t).integer("q_tokens") and applies(OP.problem(t))
    ]
    assert texts
    for text in texts:
        problem, right = arguments_of(text)
        limit = OP.tolerance(problem).limit
        assert figure(problem, right, run(TORCH.load(), {}, right)) <= limit
        wrong = dict(right)
        fault(wrong)
        actual = run(TORCH.load(), {}, wrong)
        assert not figure(problem, right, [x.nan_to_num() for x in actual]) <= 4 * limit, (
            f"{fault.__name__} passes {text}"
        )


@pytest.mark.parametrize("head", [0, 3])
def test_one_unwritten_row_is_caught(head: int) -> None:
    problem, right = arguments_of(OP.examples[2])
    actual = run(TORCH.load(), {}, right)
    actual[0][-1, head] = 0
    assert figure(problem, right, actual) > 0.5


@pytest.mark.parametrize("size", [1, 4, 64, 8192])
@pytest.mark.parametrize("flags", ["", ",window=128,sinks=true"])
def test_plans_are_verified_on_contexts_of_many_blocks(size: int, flags: str) -> None:
    static = OP.static(OP.problem(f"heads=4,kv_heads=2,head_dim=64{flags}"))
    small = OP.verification(OP.at_bucket(static, size), TORCH, {})
    queries, contexts = lengths(small, 0)
    assert max(contexts) == 333 and sum(queries) == small.integer("q_tokens") <= 67
    arguments = OP.inputs(small, 0, "cpu")
    assert OP.static(OP.describe(*arguments)) == static


@pytest.mark.parametrize("seed", range(40))
def test_lengths_keep_their_bounds(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    seqs, max_q = (int(torch.randint(1, 9, (), generator=g)) for _ in range(2))
    max_ctx = max_q + int(torch.randint(0, 30, (), generator=g))
    tokens = int(torch.randint(0, seqs * max_q + 1, (), generator=g))
    total = int(torch.randint(tokens, seqs * max_ctx + 1, (), generator=g))
    problem = OP.problem(
        f"q_tokens={tokens},seqs={seqs},max_q={max_q},max_ctx={max_ctx},total_ctx={total},heads=1,kv_heads=1"
    )
    queries, contexts = lengths(problem, seed)
    assert sum(queries) == tokens and sum(contexts) == total and len(queries) == len(contexts) == seqs
    assert all(0 <= q <= min(c, max_q) and c <= max_ctx for q, c in zip(queries, contexts, strict=True))


def test_lengths_that_cannot_be_are_refused() -> None:
    problem = OP.problem("q_tokens=8,seqs=2,max_q=4,max_ctx=8,total_ctx=16,heads=1,kv_heads=1")
    with pytest.raises(ValueError, match="9 new tokens do not fit in 2 sequences of at most 4"):
        lengths(problem.with_values(q_tokens=9), 0)


SCALES = ["", ",kv=fp8,kv_scale=head", ",kv=fp8,kv_scale=token"]
LONG = "q_tokens=6,seqs=4,max_q=3,max_ctx=1500,total_ctx=3300,heads=4,kv_heads=2,head_dim=48,x=bf16,sinks=true,lse=true"


@pytest.mark.parametrize("level", [x for x in runnable_levels() if x in ("base", "avx2", "avx512", "neon")])
@pytest.mark.parametrize(
    ("window", "scales"), [(0, SCALES[0]), (700, SCALES[0]), (0, SCALES[1]), (700, SCALES[2])]
)
def test_cpu_results_do_not_depend_on_batch_or_threads(level: str, window: int, scales: str) -> None:
    """For contexts of several chunks, results are bitwise equal whether split over threads or not, alone or
    in a batch."""
    problem, a = arguments_of(f"{LONG},window={window}{scales}")
    before, runs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            runs.append(cpp(a, level))
        assert all(torch.equal(x, y) for other in runs[1:] for x, y in zip(runs[0], other, strict=True))
        assert figure(problem, a, runs[0]) <= OP.tolerance(problem).limit
        begin = a["query_start"].tolist()
        for i in range(len(begin) - 1):
            # Each token as its own decode, with the context cut after it.
            for t in range(begin[i], begin[i + 1]):
                single = dict(
                    a,
                    q=a["q"][t : t + 1],
                    block_table=a["block_table"][i : i + 1],
                    lse=a["lse"][t : t + 1],
                    query_start=torch.tensor([0, 1], dtype=torch.int32),
                    seq_lens=a["seq_lens"][i : i + 1] - (begin[i + 1] - 1 - t),
                )
                for x, y in zip(runs[0], cpp(single, level), strict=True):
                    assert torch.equal(x[t], y[0])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kernel", ["cpp", "torch"])
def test_blocks_behind_the_window_are_not_followed(kernel: str) -> None:
    """With a window, a runtime may free old blocks. Their table entries and contents are then garbage."""
    problem, a = arguments_of(
        "q_tokens=3,seqs=3,max_q=1,max_ctx=90,total_ctx=250,heads=2,kv_heads=1,head_dim=32,window=20"
    )
    expected = run_reference(OP, list(a.values()))
    a["block_table"] = a["block_table"].clone()
    for i, context in enumerate(a["seq_lens"].tolist()):
        freed = max(0, context - 20) // 16
        a["k_cache"][a["block_table"][i, :freed].long()] = math.nan
        a["block_table"][i, :freed] = 2**30
    actual = cpp(a) if kernel == "cpp" else run(TORCH.load(), {}, a)
    assert error_of(OP, problem, list(a.values()), actual, expected) <= OP.tolerance(problem).limit


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_table", [[99, 0]]),
        ("block_table", [[-1, 0]]),
        ("seq_lens", [33]),
        ("seq_lens", [-1]),
        ("query_start", [0, 9]),
        ("query_start", [2, 1]),
    ],
)
def test_cpu_kernel_refuses_indices_that_do_not_exist(name: str, value: list[Any]) -> None:
    _, a = arguments_of(
        "q_tokens=2,seqs=1,max_q=2,max_ctx=32,total_ctx=32,heads=2,kv_heads=1,head_dim=16,x=fp32"
    )
    cpp(a)
    a[name] = torch.tensor(value, dtype=torch.int32)
    with pytest.raises(ValueError, match="paged_attention"):
        cpp(a)


BAD: list[tuple[str, Callable[[Any], Any], type[Exception], str]] = [
    ("q", lambda q: q[0], ValueError, r"q must be \[q_tokens, heads, head_dim\]"),
    (
        "q",
        lambda q: q.transpose(1, 2).contiguous().transpose(1, 2),
        ValueError,
        "q must be contiguous in its last dimension",
    ),
    ("q", lambda q: q[:, :1].repeat(1, 3, 1), ValueError, "3 query heads do not divide among 2"),
    (
        "k_cache",
        lambda k: k.double(),
        TypeError,
        "k_cache must have q's dtype torch.float32 or torch.float8_e4m3fn, got torch.float64",
    ),
    ("v_cache", lambda v: v[:, :3], ValueError, "v_cache must be .*block_size as in k_cache"),
    ("k_cache", lambda k: k[..., :32].contiguous(), ValueError, "k_cache must be .*head_dim as in q"),
    ("block_table", lambda t: t.long(), TypeError, "block_table must be torch.int32, got torch.int64"),
    (
        "block_table",
        lambda t: t[:1],
        ValueError,
        r"query_start must be \[seqs\+1\] = \[2\], seqs as in block_table, got \[4\]",
    ),
    (
        "seq_lens",
        lambda t: t[:2],
        ValueError,
        r"seq_lens must be \[seqs\] = \[3\], seqs as in block_table, got \[2\]",
    ),
    ("query_start", lambda t: t[:1], ValueError, "query_start must be"),
    ("max_ctx", lambda n: 1000, ValueError, "max_ctx 1000 is more than"),
    ("max_q", lambda n: 0, ValueError, "max_q must be at least 1, got 0"),
    (
        "sinks",
        lambda s: torch.zeros(3),
        ValueError,
        r"sinks must be \[heads\] = \[4\], heads as in q, got \[3\]",
    ),
    ("lse", lambda s: torch.zeros(5, 4).half(), TypeError, "lse must be torch.float32"),
]


@pytest.mark.parametrize(
    ("name", "change", "kind", "message"), BAD, ids=lambda x: x if isinstance(x, str) else ""
)
def test_describe_refuses(
    name: str, change: Callable[[Any], Any], kind: type[Exception], message: str
) -> None:
    _, a = arguments_of(
        "q_tokens=5,seqs=3,max_q=3,max_ctx=40,total_ctx=60,heads=4,kv_heads=2,head_dim=64,x=fp32"
    )
    OP.describe(**a)
    a[name] = change(a[name])
    with pytest.raises(kind, match=message):
        OP.describe(**a)


GUARDED: list[tuple[str, Callable[[Any], Any]]] = [
    ("q", lambda q: q[:, :2]),
    ("q", lambda q: q.half()),
    ("k_cache", lambda k: k[:, :3]),
    ("v_cache", lambda v: v[:-1]),
    ("block_table", lambda t: t[:, :1]),
    ("block_table", lambda t: t[:1]),
    ("query_start", lambda t: t[:-1]),
    ("window", lambda w: 5),
    ("sinks", lambda s: torch.zeros(4)),
    ("lse", lambda s: torch.zeros(5, 4)),
    ("max_q", lambda n: 1),
]


@pytest.mark.parametrize(("name", "change"), GUARDED)
def test_guard_refuses(name: str, change: Callable[[Any], Any]) -> None:
    problem, a = arguments_of(
        "q_tokens=5,seqs=3,max_q=3,max_ctx=40,total_ctx=60,heads=4,kv_heads=2,head_dim=64,x=fp32"
    )
    static, out = OP.static(problem), torch.empty(5, 4, 64)
    assert OP.guard(static)(OP.Call(*a.values(), out)) == 5
    a[name] = change(a[name])
    with pytest.raises(ValueError, match="paged_attention"):
        OP.guard(static)(OP.Call(*a.values(), out))


@pytest.mark.parametrize("softcap", [0.5, 50.0, 1e6])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("level", [x for x in runnable_levels() if x in ("base", "avx2", "avx512", "neon")])
def test_soft_caps_of_any_size(level: str, scales: str, softcap: float) -> None:
    """Caps far under the scores, as of Gemma 2, and so large that nothing is left of them but rounding."""
    problem, a = arguments_of(f"{LONG},window=700{scales},softcap=true")
    a["softcap"] = softcap
    assert figure(problem, a, cpp(a, level)) <= OP.tolerance(problem).limit
    assert figure(problem, a, run(TORCH.load(), {}, a)) <= OP.tolerance(problem).limit
    if softcap == 1e6:
        assert figure(problem, {**a, "softcap": 0.0}, cpp(a, level)) <= OP.tolerance(problem).limit


@pytest.mark.parametrize("level", [x for x in runnable_levels() if x in ("base", "avx2", "avx512", "neon")])
@pytest.mark.parametrize("more", ["", ",softcap=true", ",window=5", ",sinks=true", ",lse=true"])
@pytest.mark.parametrize(
    "sizes",
    [
        "q_tokens=9,seqs=3,max_q=7,max_ctx=40,total_ctx=60",
        "q_tokens=2,seqs=2,max_q=1,max_ctx=3000,total_ctx=5000",
    ],
)
def test_a_query_without_numbers_gives_none(level: str, more: str, sizes: str) -> None:
    """It does not look like one without keys, whose result is 0: damaged weights must show in the logits."""
    _, a = arguments_of(f"{sizes},heads=4,kv_heads=2,head_dim=64,x=fp32{more}")
    expected = cpp(a, level)
    a["q"] = a["q"].clone()
    a["q"][1, 2] = math.nan
    out, *lse = cpp(a, level)
    right, *_ = run(TORCH.load(), {}, a)
    assert out[1, 2].isnan().all() and right[1, 2].isnan().all() and out.isnan().sum() == 64
    out[1, 2] = expected[0][1, 2]
    torch.testing.assert_close(out, expected[0])
    for mine, before in zip(lse, expected[1:], strict=True):
        mine[1, 2] = before[1, 2]
        torch.testing.assert_close(mine, before)


@pytest.mark.parametrize("softcap", [-1.0, math.inf, math.nan])
def test_soft_caps_that_are_none_are_refused(softcap: float) -> None:
    _, a = arguments_of(OP.examples[2])
    with pytest.raises(ValueError, match="softcap"):
        OP.describe(*{**a, "softcap": softcap}.values())
