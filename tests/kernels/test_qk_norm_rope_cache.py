"""qk_norm_rope_cache: agreement with transformers and with the three separate kernels, head sizes, strides, slots, refusals, planted
faults."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from gristmill import ops
from gristmill.kernels.kv_cache import qk_norm_rope_cache
from gristmill.kernels.load import load
from tests.calls import make_call, positional
from tests.kernels.running import REGISTRY, Runnable, runnables, verify_fault

OP, NAME, reference = qk_norm_rope_cache.OP, qk_norm_rope_cache.NAME, qk_norm_rope_cache.reference
RUNNABLES = runnables(NAME)
NATIVE = [r for r in RUNNABLES if r.kernel.language == "cpp"]
NAMES = [parameter.name for parameter in OP.parameters]


def arguments(text: str) -> dict[str, Any]:
    """Returns the generated arguments of a problem by name, and its output, poisoned."""
    problem = OP.problem(text)
    named = dict(zip(NAMES, OP.inputs(problem, 0, "cpu"), strict=True))
    q = torch.full((problem.integer("t"), problem.integer("heads"), problem.integer("head_dim")), math.nan)
    return named | {"q": q.to(named["qkv"].dtype)}


def copied(call: dict[str, Any]) -> dict[str, Any]:
    """Returns a call with its own caches, scales and output, of the same strides."""
    written = ("key_cache", "value_cache", "k_scale", "v_scale", "q")

    def copy(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)

    return {n: copy(x) if n in written and x is not None else x for n, x in call.items()}


def results(call: dict[str, Any]) -> list[torch.Tensor]:
    """Returns what a call has written."""
    names = ("q", "key_cache", "value_cache", "k_scale", "v_scale")
    return [call[name] for name in names if call[name] is not None]


def expected_of(call: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of a call after the reference."""
    expected = copied(call)
    expected["q"] = reference(*(expected[name] for name in NAMES))
    return expected


def assert_right(text: str, call: dict[str, Any], expected: dict[str, Any]) -> None:
    figure = OP.error(OP.problem(text), [call[n] for n in NAMES], results(call), results(expected))
    assert figure <= OP.tolerance(OP.problem(text)).limit


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the bytes of two tensors are equal."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_reference_means_what_qwen3_means() -> None:
    """In float32, against the modules of transformers and a plain loop over the tokens."""
    call = arguments("t=9,heads=4,kv_heads=2,head_dim=32,rot=32,norm=true,block_size=4,x=fp32")
    heads = call["qkv"].transpose(0, 1)[None].split([4, 2, 2], 1)
    normed = []
    for x, weight in zip(heads, (call["q_weight"], call["k_weight"]), strict=False):
        norm = Qwen3RMSNorm(32, eps=call["eps"])
        norm.weight.data = weight
        normed.append(norm(x))
    table = call["cos_sin"][call["positions"]].chunk(2, -1)
    cos, sin = (torch.cat([half, half], -1)[None] for half in table)
    q, k = (x[0].transpose(0, 1) for x in apply_rotary_pos_emb(*normed, cos, sin))
    after = expected_of(call)
    torch.testing.assert_close(after["q"], q, rtol=0, atol=3e-6)
    key_cache, value_cache = call["key_cache"].clone(), call["value_cache"].clone()
    for token, slot in enumerate(call["slot_mapping"].tolist()):
        if slot >= 0:
            key_cache[slot // 4, slot % 4] = k[token]
            value_cache[slot // 4, slot % 4] = heads[2][0, :, token]
    torch.testing.assert_close(after["key_cache"], key_cache, rtol=0, atol=3e-6)
    assert torch.equal(after["value_cache"], value_cache)


def separately(call: dict[str, Any], implementation: Runnable) -> None:
    """Runs the C++ kernels of the three operations at the code level of `implementation`."""

    def run(op: str, problem: str, *tensors: Any) -> None:
        kernel = REGISTRY.kernel(op, f"{op}_cpu")
        load(kernel)(
            kernel.config(REGISTRY.op(op).problem(problem), implementation.target),
            make_call(kernel.op, *tensors),
        )

    kv_heads, d = call["key_cache"].shape[2:]
    q, k, value = call["qkv"].split([call["q"].shape[1], kv_heads, kv_heads], 1)
    q, k = call["q"].copy_(q), k.contiguous()
    for x, weight in ((q, call["q_weight"]), (k, call["k_weight"])):
        if weight is not None:
            run("rms_norm", f"n={d}", x.clone(), weight, call["eps"], x)
    rotation = call["positions"], call["cos_sin"], call["interleaved"]
    run("rotary_embedding", f"hq={q.shape[1]},hk={kv_heads},d={d},rot=2", q, k, *rotation)
    quantized = ",kv=fp8,kv_scale=head" if call["k_scale"] is not None else ""
    written = (call[name] for name in ("key_cache", "value_cache", "slot_mapping", "k_scale", "v_scale"))
    run("reshape_and_cache", f"h={kv_heads},d={d},dv={d}{quantized}", k, value, *written)


@pytest.mark.parametrize("implementation", NATIVE, ids=str)
@pytest.mark.parametrize("x", ["fp32", "fp16", "bf16"])
def test_one_call_gives_the_bits_of_the_three_kernels(implementation: Runnable, x: str) -> None:
    """Every kind of cache, style and norm, at the same code level: a model gives the same ids either way."""
    for kind in ("", ",kv=fp8,kv_scale=head", ",kv=fp8,kv_scale=token"):
        for norm in ("true", "false", *(("true,w=fp32",) if x != "fp32" else ())):
            for style, rot in (("neox", 40), ("gptj", 14), ("neox", 26)):
                text = f"t=19,heads=5,kv_heads=3,head_dim=40,rot={rot},style={style},norm={norm},x={x}{kind}"
                fused = arguments(text)
                apart = copied(fused)
                implementation(*fused.values())
                separately(apart, implementation)
                assert all(same(*pair) for pair in zip(results(fused), results(apart), strict=True)), text


@pytest.mark.parametrize("implementation", RUNNABLES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_head_sizes_and_strides(implementation: Runnable, head_dim: int) -> None:
    """Rows of a wider product, keys and values interleaved in one cache, slots that no token owns filled with NaN."""
    kv_heads, rot = {64: 1, 80: 2, 96: 3, 128: 8, 192: 5, 256: 4}[head_dim], head_dim - head_dim % 64
    text = f"t=7,heads={2 * kv_heads},kv_heads={kv_heads},head_dim={head_dim},rot={rot},norm=true"
    call = arguments(text)
    rows = torch.full((7, 4 * kv_heads * head_dim + 9), math.nan, dtype=torch.bfloat16)
    call["qkv"] = rows[:, 3 : 3 + 4 * kv_heads * head_dim].view(7, -1, head_dim).copy_(call["qkv"])
    both = torch.full((3, 16, kv_heads, 2 * head_dim), math.nan, dtype=torch.bfloat16)
    call["key_cache"], call["value_cache"] = both.split(head_dim, -1)
    call["slot_mapping"] = torch.tensor([40, -1, 0, 47, -7, 17, 15])
    expected = expected_of(call)
    implementation(*call.values())
    written = call["slot_mapping"][call["slot_mapping"] >= 0]
    left = torch.ones(48, dtype=torch.bool).index_fill(0, written, False).view(3, 16)
    assert both[left].isnan().all() and not both[~left].isnan().any()
    assert_right(text, call, expected)


@pytest.mark.parametrize("implementation", RUNNABLES, ids=str)
def test_one_scale_for_the_tensor(implementation: Runnable) -> None:
    text = "t=5,heads=4,kv_heads=2,head_dim=24,rot=24,norm=true,x=fp32,kv=fp8,kv_scale=head"
    call = arguments(text)
    call |= {name: torch.full((1, 1, 1), 0.01 * place) for place, name in ((1, "k_scale"), (2, "v_scale"))}
    expected = expected_of(call)
    implementation(*call.values())
    assert_right(text, call, expected)


@pytest.mark.parametrize("implementation", RUNNABLES, ids=str)
@pytest.mark.parametrize("style", ["neox", "gptj"])
def test_positions_outside_the_table_give_nan(implementation: Runnable, style: str) -> None:
    """In the rotated part of q and k of those tokens; the rest, the values and other tokens are as they should be."""
    text = f"t=4,heads=2,kv_heads=1,head_dim=20,rot=12,style={style},norm=true,x=fp32"
    call = arguments(text)
    call["positions"] = torch.tensor([-1, 5, 4096, 2**62])
    call["slot_mapping"] = torch.arange(4)
    expected = expected_of(call)
    implementation(*call.values())
    for out in (call["q"], call["key_cache"][0, :4]):
        assert out[..., :12].isnan().all(-1).all(-1).tolist() == [True, False, True, True]
        assert not out[..., 12:].isnan().any()
    assert torch.equal(call["value_cache"], expected["value_cache"])
    torch.testing.assert_close(call["q"], expected["q"], rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("implementation", RUNNABLES, ids=str)
@pytest.mark.parametrize("slot", [48, 2**40])
def test_a_slot_past_the_cache_is_never_written(implementation: Runnable, slot: int) -> None:
    call = arguments("t=3,heads=2,kv_heads=1,head_dim=8,rot=8,block_size=16,x=fp32")
    around = torch.zeros(2, 5, 16, 1, 8)
    call["key_cache"], call["value_cache"] = around[:, 1:4]
    call["slot_mapping"] = torch.tensor([slot, 1, -1])
    if implementation.kernel.language == "triton":
        implementation(*call.values())
        assert around[:, 1, 1].count_nonzero() == around.count_nonzero() > 8
    else:
        with pytest.raises(ValueError, match=f"{NAME}: slot {slot} is past the cache of 48 slots"):
            implementation(*call.values())
        assert around.count_nonzero() == 0


@pytest.mark.parametrize("implementation", RUNNABLES, ids=str)
def test_offsets_are_64_bits_wide(implementation: Runnable) -> None:
    """Blocks are 2^30 elements apart; only the pages that are written occupy memory."""
    text = "t=2,heads=1,kv_heads=1,head_dim=8,rot=8,block_size=2"
    call = arguments(text)
    flat = torch.empty(4 * 2**30, dtype=torch.bfloat16)
    blocks = flat.view(4, 2**15, 1, 2**15)
    call["key_cache"], call["value_cache"] = blocks[:, :2, :, :8], blocks[:, 2:4, :, :8]
    call["slot_mapping"] = torch.tensor([7, 2])
    implementation(*call.values())
    keys = torch.stack((call["key_cache"][3, 1], call["key_cache"][1, 0]))
    values = torch.stack((call["value_cache"][3, 1], call["value_cache"][1, 0]))
    plain = torch.zeros(2, 4, 2, 1, 8, dtype=torch.bfloat16)
    expected = expected_of(call | {"key_cache": plain[0], "value_cache": plain[1]})
    torch.testing.assert_close(keys, torch.stack((expected["key_cache"][3, 1], expected["key_cache"][1, 0])))
    assert torch.equal(values, call["qkv"][:, 2:])


def test_refusals() -> None:
    valid = arguments("t=4,heads=2,kv_heads=1,head_dim=16,rot=16,norm=true,x=fp32")
    del valid["q"]
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"q_weight": None}, ValueError, "q_weight and k_weight must be given together"),
        ({"k_weight": torch.ones(8)}, ValueError, r"k_weight must be \[head_dim\] = \[16\]"),
        ({"qkv": valid["qkv"][:, :2]}, ValueError, "heads at least 1 where 2 \\* kv_heads is 2"),
        ({"qkv": valid["qkv"].flatten(1)}, ValueError, r"qkv must be \[t, heads\+2\*kv_heads, head_dim\]"),
        ({"qkv": torch.randn(4, 16, 4).transpose(1, 2)}, ValueError, "qkv must be contiguous in its last"),
        (
            {"cos_sin": torch.ones(8, 18)},
            ValueError,
            "rot must be even, at least 2 and at most the head size",
        ),
        ({"cos_sin": torch.ones(0, 16)}, ValueError, "cos_sin must have a row for at least one position"),
        ({"k_scale": torch.ones(1, 1, 1)}, ValueError, "k_scale and v_scale must be given together"),
        ({"slot_mapping": valid["slot_mapping"].int()}, TypeError, "slot_mapping must be torch.int64"),
        ({"eps": -1.0}, ValueError, "eps must be at least 0"),
        ({"q_weight": None, "k_weight": torch.ones(16).half()}, ValueError, "must be given together"),
        ({"q_weight": torch.ones(16).half()}, TypeError, "q_weight must have qkv's dtype torch.float32 or"),
        ({"k_weight": torch.ones(16).half()}, TypeError, "k_weight must have q_weight's dtype torch.float32"),
    ]
    for changes, kind, message in cases:
        with pytest.raises(kind, match=message):
            ops.qk_norm_rope_cache(**(valid | changes))
    guard = OP.guard(OP.problem("heads=2,kv_heads=1,head_dim=16,rot=16,norm=true,x=fp32"))
    out = torch.empty(4, 2, 16)
    assert guard(OP.Call(*valid.values(), out)) == 4
    halves = {name: torch.ones(16).half() for name in ("q_weight", "k_weight")}
    for changes in ({"q_weight": None, "k_weight": None}, {"k_weight": None}, {"interleaved": True}, halves):
        with pytest.raises(ValueError, match="planned for"):
            guard(OP.Call(*(valid | changes).values(), out))


@positional
def k_not_normalized(config: Any, *call: Any) -> None:
    qkv, q_weight, k_weight, *rest, q = call
    q.copy_(reference(qkv, q_weight, torch.ones_like(k_weight), *rest))


@positional
def norm_after_the_rotation(config: Any, *call: Any) -> None:
    qkv, q_weight, k_weight, eps, *rest, q = call
    turned = reference(qkv, None, None, eps, *rest)
    reference(qkv, q_weight, k_weight, eps, *rest)
    q.copy_(qk_norm_rope_cache.rms_norm.reference(turned, q_weight, eps))


@positional
def values_as_keys(config: Any, *call: Any) -> None:
    qkv, *rest, q = call
    heads = (qkv.shape[1] - q.shape[1]) // 2
    q.copy_(reference(torch.cat((qkv[:, :-heads], qkv[:, -2 * heads : -heads]), 1), *rest))


@positional
def other_style(config: Any, *call: Any) -> None:
    *front, interleaved, k_scale, v_scale, q = call
    q.copy_(reference(*front, not interleaved, k_scale, v_scale))


@positional
def slot_off_by_one(config: Any, *call: Any) -> None:
    *front, slots, interleaved, k_scale, v_scale, q = call
    q.copy_(reference(*front, torch.where(slots > 0, slots - 1, slots), interleaved, k_scale, v_scale))


@positional
def scale_before_the_rotation(config: Any, *call: Any) -> None:
    """The scale of a key is taken from the head before it is rotated: other codes that mean nearly the same."""
    *rest, k_scale, v_scale, q = call
    scales = k_scale.clone(), v_scale
    q.copy_(reference(*rest, k_scale, v_scale))
    at_zero = [torch.zeros_like(x) if place == 4 else x for place, x in enumerate(rest)]
    at_zero[6:8] = rest[6].clone(), rest[7].clone()
    reference(*at_zero, *scales)
    k_scale.copy_(scales[0])


@positional
def rounded_up(config: Any, *call: Any) -> None:
    """The codes of one head of one key are the next larger ones."""
    *rest, q = call
    q.copy_(reference(*rest))
    codes, slots = rest[6].view(torch.uint8), rest[8]
    slot = int(slots[slots >= 0][-1])
    head = codes[slot // codes.shape[1], slot % codes.shape[1], 0]
    head += (head & 0x7F < 0x7E).to(torch.uint8)


@positional
def rest_scaled(config: Any, *call: Any) -> None:
    *rest, q = call
    q.copy_(reference(*rest))
    q[..., -1] *= 1 + 2**-6


PLAIN = "t=33,heads=4,kv_heads=2,head_dim=40,rot=24,norm=true,block_size=5"
FAULTS = {
    "k_not_normalized": ("", ",kv=fp8,kv_scale=head"),
    "norm_after_the_rotation": ("",),
    "values_as_keys": ("", ",kv=fp8,kv_scale=token"),
    "other_style": ("", ",kv=fp8,kv_scale=head"),
    "slot_off_by_one": ("", ",kv=fp8,kv_scale=token"),
    "scale_before_the_rotation": (",kv=fp8,kv_scale=token",),
    "rounded_up": (",kv=fp8,kv_scale=head", ",kv=fp8,kv_scale=token"),
    "rest_scaled": ("",),
}


@pytest.mark.parametrize(("fault", "kind"), [(f, kind) for f, kinds in FAULTS.items() for kind in kinds])
def test_verification_catches_wrong_kernels(fault: str, kind: str) -> None:
    assert not verify_fault(NAME, __name__, fault, PLAIN + kind).ok


def test_without_a_norm_what_is_not_rotated_is_a_copy() -> None:
    text = PLAIN.replace("norm=true", "norm=false")
    call = arguments(text)
    expected = expected_of(call)
    for change in (0.0, 2.0**-7):
        near = copied(expected)
        near["q"][3, 1, 30] += change * near["q"][3, 1, 30]
        figure = OP.error(OP.problem(text), [call[n] for n in NAMES], results(near), results(expected))
        assert figure == (math.inf if change else 0.0)


def test_operator(policy_file: Any) -> None:
    """With and without scales; torch's checks of the overload without, and no tokens."""
    policy_file()
    for kind in ("", ",kv=fp8,kv_scale=token"):
        text = "t=4,heads=2,kv_heads=1,head_dim=16,rot=16,norm=true,x=fp32" + kind
        call = arguments(text)
        expected = expected_of(call)
        call["q"] = ops.qk_norm_rope_cache(**{name: call[name] for name in NAMES})
        assert_right(text, call, expected)
    inputs = [x for name, x in arguments(text).items() if name not in ("k_scale", "v_scale", "q")]
    inputs[6:8] = [torch.zeros(4, 16, 1, 16) for _ in range(2)]
    torch.library.opcheck(
        torch.ops.gristmill.qk_norm_rope_cache.default, inputs, test_utils=("test_schema", "test_faketensor")
    )
    call = arguments("t=0,heads=2,kv_heads=1,head_dim=16,rot=16,x=fp32")
    assert ops.qk_norm_rope_cache(**{name: call[name] for name in NAMES}).shape == (0, 2, 16)


@pytest.mark.slow
def test_compiles_to_one_graph(policy_file: Any) -> None:
    """The caches and the scales of tokens are written in place."""
    policy_file()
    text = "t=4,heads=2,kv_heads=1,head_dim=16,rot=16,norm=true,x=fp32,kv=fp8,kv_scale=token"
    call = arguments(text)
    expected = expected_of(call)
    compiled = torch.compile(ops.qk_norm_rope_cache, fullgraph=True)
    call["q"] = compiled(**{name: call[name] for name in NAMES})
    assert_right(text, call, expected)
