"""rotary_embedding and its tables: agreement with transformers, strided slices, out-of-range positions,
planted faults."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rotary
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from gristmill import ops
from gristmill.kernels.rope import cache
from gristmill.kernels.rope.cache import RopeParameters, inverse_frequencies, rope_cache
from gristmill.kernels.rope.rotary_embedding import OP, error, reference
from tests.calls import positional
from tests.kernels.running import Runnable, runnables, verify_fault

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn given factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 4096,
        "beta_fast": 64,
        "beta_slow": 2,
    },
    "yarn of gpt-oss": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    "yarn of deepseek v2": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "original_max_position_embeddings": 4096,
    },
}


def _config(scaling: dict[str, Any], head: int = 128) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=head * 2,
        num_attention_heads=2,
        head_dim=head,
        max_position_embeddings=131072,
        rope_parameters=dict(scaling),
    )


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("head", [64, 128])
def test_tables_are_those_of_transformers(name: str, head: int) -> None:
    config = _config(SCALINGS[name], head)
    parameters = RopeParameters.parse(SCALINGS[name])
    transformers_rope = LlamaRotaryEmbedding(config)
    torch.testing.assert_close(
        inverse_frequencies(head, parameters), transformers_rope.inv_freq, rtol=3e-7, atol=0
    )
    assert parameters.table_factor == pytest.approx(transformers_rope.attention_scaling, rel=1e-12)
    if name != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[str(SCALINGS[name]["rope_type"])](
            config, torch.device("cpu")
        )
        frequencies64 = inverse_frequencies(head, parameters, "float64")
        torch.testing.assert_close(frequencies64, frequencies.double(), rtol=2e-6, atol=0)
        assert parameters.table_factor == pytest.approx(factor, rel=1e-12)
    cos, sin = transformers_rope(torch.zeros(1), torch.arange(3000)[None])
    table = rope_cache(head, 3000, parameters)
    expected = torch.cat([cos[0, :, : head // 2], sin[0, :, : head // 2]], -1)
    # One float32 step of a frequency changes the angle of position 3,000 by 3,000 · 2⁻²⁴ radians.
    torch.testing.assert_close(table, expected, rtol=0, atol=5e-4)
    assert (table - expected).abs().mean() < 1e-5
    assert torch.equal(table[:2], expected[:2]) or (table[:2] - expected[:2]).abs().max() < 3e-7


def test_default_table_against_float64_mathematics() -> None:
    table = rope_cache(8, 5000, RopeParameters(theta=10000.0), precision="float64")
    for position in (0, 1, 4999):
        for pair in range(4):
            angle = position * 10000.0 ** (-2 * pair / 8)
            assert table[position, pair].item() == pytest.approx(math.cos(angle), abs=1e-7)
            assert table[position, 4 + pair].item() == pytest.approx(math.sin(angle), abs=1e-7)


class Made(TorchDispatchMode):
    """The bytes of what operators of torch return, by address."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        memory = result.untyped_storage()
        self.bytes[memory.data_ptr()] = max(memory.nbytes(), self.bytes.get(memory.data_ptr(), 0))
        return result


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_long_tables_are_computed_in_slices(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of one piece, and little memory beside the table. Planted: slices that all begin at position 0, and one slice alone."""
    rot, positions, parameters = 12, 3 * cache.SLICE + 5, RopeParameters.parse(SCALINGS["yarn"])
    frequencies = inverse_frequencies(rot, parameters, precision)
    angles = torch.arange(positions, dtype=frequencies.dtype)[:, None] * frequencies
    factor, most = parameters.table_factor, cache.SLICE * rot * frequencies.itemsize
    whole = torch.cat([angles.cos() * factor, angles.sin() * factor], dim=-1).float()

    def beside() -> int:
        with Made() as made:
            table = rope_cache(rot, positions, parameters, precision=precision)
        assert torch.equal(table, whole)
        del made.bytes[table.data_ptr()]
        return max(made.bytes.values())

    assert beside() <= most
    arange = torch.arange
    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(cache, "inverse_frequencies", lambda *_: frequencies)
        patch.setattr(torch, "arange", lambda first, last, **given: arange(last - first, **given))
        beside()
    monkeypatch.setattr(cache, "SLICE", positions)
    assert beside() > most


def test_a_wrong_scaling_would_be_seen() -> None:
    for name, change in (
        ("llama3", {"high_freq_factor": 3.9}),
        ("yarn", {"beta_fast": 31.0, "truncate": False}),
        ("linear", {"factor": 4.001}),
    ):
        frequencies, _ = ROPE_INIT_FUNCTIONS[name](_config(SCALINGS[name]), torch.device("cpu"))
        wrong = inverse_frequencies(128, RopeParameters.parse(SCALINGS[name] | change))
        assert ((wrong - frequencies).abs() / frequencies).max() > 1e-4


def test_deepseek_scales_its_softmax() -> None:
    parameters = RopeParameters.parse(SCALINGS["yarn of deepseek v2"])
    assert parameters.table_factor == pytest.approx(1.0)
    assert parameters.softmax_factor == pytest.approx((0.1 * 0.707 * math.log(40) + 1) ** 2)
    assert RopeParameters.parse(SCALINGS["llama3"]).softmax_factor == 1.0


def test_tables_of_configurations_old_and_broken() -> None:
    old = {"type": "linear", "factor": 2.0}
    assert RopeParameters.parse(old, theta=5000.0) == RopeParameters(theta=5000.0, kind="linear", factor=2.0)
    inferred = RopeParameters.parse(
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": None, "original_max_position_embeddings": 4096},
        max_positions=16384,
    )
    assert inferred.factor == 4.0
    for table, message in (
        (
            {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            "dynamic.*not supported; supported: default, linear",
        ),
        ({"type": "su", "rope_theta": 1e4, "factor": 2.0}, "longrope needs short_factor"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "linear needs factor"),
        ({"rope_type": "linear", "factor": 2.0}, "needs rope_theta"),
        (
            {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0},
            "needs high_freq_factor",
        ),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}, "needs original_max_position_embeddings"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}, "factor must be positive"),
        ({"rope_type": "default", "rope_theta": 1.0}, "theta must be over 1"),
    ):
        with pytest.raises(ValueError, match=message):
            RopeParameters.parse(table)
    with pytest.raises(ValueError, match="must be even"):
        rope_cache(7, 8, RopeParameters())
    with pytest.raises(ValueError, match="at least one position"):
        rope_cache(8, 0, RopeParameters())
    with pytest.raises(ValueError, match="float32 or float64"):
        rope_cache(8, 8, RopeParameters(), precision="bfloat16")


def _arguments(t: int, hq: int, hk: int, d: int, rot: int, dtype: torch.dtype) -> list[torch.Tensor]:
    q, k = torch.randn(t, hq, d).to(dtype), torch.randn(t, hk, d).to(dtype)
    return [q, k, torch.randint(0, 500, (t,)), rope_cache(rot, 500, RopeParameters())]


def test_halves_mean_what_llama_means() -> None:
    q, k, positions, table = _arguments(6, 4, 2, 32, 32, torch.float32)
    cos, sin = (torch.cat([half, half], -1)[None] for half in table[positions].chunk(2, -1))
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    reference(q, k, positions, table)
    for actual, rotated in zip((q, k), expected, strict=True):
        torch.testing.assert_close(actual, rotated[0].transpose(0, 1), rtol=0, atol=1e-6)


def test_neighbours_mean_what_gptj_and_deepseek_mean() -> None:
    q, k, positions, table = _arguments(6, 4, 1, 32, 32, torch.float32)
    cos, sin = table[positions].chunk(2, -1)
    rotated = gptj_rotary(q[None], sin[None], cos[None])[0]
    doubled = (torch.cat([half, half], -1)[None] for half in (cos, sin))
    deepseek = apply_rotary_pos_emb_interleave(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *doubled)
    reference(q, k, positions, table, True)
    torch.testing.assert_close(q, rotated, rtol=0, atol=1e-6)
    # transformers leaves DeepSeek's pairs as halves in both q and k, so the scores are the same.
    for actual, other in zip((q, k), deepseek, strict=True):
        halves = torch.cat([actual[..., 0::2], actual[..., 1::2]], -1)
        torch.testing.assert_close(halves, other[0].transpose(0, 1), rtol=0, atol=1e-6)


def _within_tolerance(actual: list[torch.Tensor], expected: list[torch.Tensor], problem: str) -> bool:
    parsed = OP.problem(problem)
    return error(parsed, [], actual, expected) <= OP.tolerance(parsed).limit


@pytest.mark.parametrize("implementation", runnables("rotary_embedding"), ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("style", ["neox", "gptj"])
def test_a_slice_of_the_heads_turns_and_nothing_else(
    implementation: Runnable, dtype: str, style: str
) -> None:
    """DeepSeek: the last 22 of 40 elements of each head of q, and a slice of the latent row as the only head
    of k."""
    whole_q, latent = torch.randn(5, 3, 40).to(DTYPES[dtype]), torch.randn(5, 60).to(DTYPES[dtype])
    before_q, before_latent = whole_q.clone(), latent.clone()
    q, k = whole_q[..., 18:], latent[:, None, 38:]
    positions, table = torch.tensor([3, 0, 499, 7, 7]), rope_cache(22, 500, RopeParameters())
    expected = [q.clone(), k.clone()]
    reference(*expected, positions, table, style == "gptj")
    implementation(q, k, positions, table, style == "gptj")
    assert _within_tolerance([q, k], expected, f"t=5,hq=3,hk=1,d=22,rot=22,style={style},x={dtype}")
    assert torch.equal(whole_q[..., :18], before_q[..., :18]) and torch.equal(
        latent[:, :38], before_latent[:, :38]
    )
    assert not torch.equal(q, before_q[..., 18:])


@pytest.mark.parametrize("implementation", runnables("rotary_embedding"), ids=str)
def test_views_of_one_qkv_buffer_and_heads_outside_tokens(implementation: Runnable) -> None:
    qkv = torch.randn(7, (4 + 2 + 2) * 20)
    q, k = qkv[:, :80].view(7, 4, 20), qkv[:, 80:120].view(7, 2, 20)
    value = qkv[:, 120:].clone()
    positions, table = torch.arange(7), rope_cache(12, 16, RopeParameters())
    expected = [q.clone(), k.clone()]
    reference(*expected, positions, table)
    implementation(q, k, positions, table)
    assert _within_tolerance([q, k], expected, "t=7,hq=4,hk=2,d=20,rot=12,x=fp32")
    assert torch.equal(qkv[:, 120:], value)
    by_head = torch.randn(4, 7, 20).transpose(0, 1)
    expected = [by_head.clone()]
    reference(expected[0], None, positions, table)
    implementation(by_head, None, positions, table)
    assert _within_tolerance([by_head], expected, "t=7,hq=4,d=20,rot=12,x=fp32")


@pytest.mark.parametrize("implementation", runnables("rotary_embedding"), ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_outside_the_table_become_nan_and_read_nothing(
    implementation: Runnable, interleaved: bool
) -> None:
    q, k, _, table = _arguments(6, 2, 1, 16, 12, torch.float32)
    positions = torch.tensor([0, -1, 500, 499, 2**62, -(2**62)])
    before = q.clone()
    implementation(q, k, positions, table, interleaved)
    assert q[..., :12].isnan().all(-1).all(-1).tolist() == [False, True, True, False, True, True]
    assert k[..., :12].isnan().any(-1).any(-1).tolist() == [False, True, True, False, True, True]
    assert torch.equal(q[..., 12:], before[..., 12:]) and torch.equal(q[0], before[0])


def test_refusals() -> None:
    q, k, positions, table = _arguments(4, 2, 1, 16, 16, torch.float32)
    cases: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (
            ValueError,
            r"q must be \[t, hq, d\] .t: tokens; hq: heads of q; d: elements of a head.,",
            (q[0], k, positions, table),
        ),
        (
            ValueError,
            r"k must be \[t, hk, d\] = \[4, 1, 16\], t as in q, d as in q, got \[3, 1, 16\]",
            (q, k[:3], positions, table),
        ),
        (ValueError, r"k must be .* got \[4, 1, 8\]", (q, k[..., :8], positions, table)),
        (TypeError, "k must have q's dtype", (q, k.bfloat16(), positions, table)),
        (ValueError, r"positions must be \[t\] = \[4\], t as in q, got \[3\]", (q, k, positions[:3], table)),
        (TypeError, "positions must be torch.int64, got torch.int32", (q, k, positions.int(), table)),
        (TypeError, "cos_sin must be torch.float32, got torch.bfloat16", (q, k, positions, table.bfloat16())),
        (
            ValueError,
            "rot must be even, at least 2 and at most the head size 16, got 18",
            (q, k, positions, rope_cache(18, 8, RopeParameters())),
        ),
        (
            ValueError,
            "q must be contiguous in its last dimension",
            (torch.randn(4, 16, 2).transpose(1, 2), k, positions, table),
        ),
        (
            ValueError,
            "q is written, so its elements must not overlap",
            (q[:, :1].expand(4, 2, 16), k, positions, table),
        ),
        (
            ValueError,
            "q is written, so its elements must not overlap",
            (torch.randn(100).as_strided((4, 2, 16), (16, 8, 1)), k, positions, table),
        ),
        (ValueError, "cos_sin must be contiguous", (q, k, positions, torch.randn(500, 32)[:, :16])),
    ]
    for kind, message, arguments in cases:
        with pytest.raises(kind, match=message):
            ops.rotary_embedding(*arguments)
        static = OP.static(OP.problem("hq=2,hk=1,d=16,rot=16,x=fp32"))
        with pytest.raises((ValueError, TypeError)):
            OP.guard(static)(OP.Call(*arguments, *(False,)[len(arguments) - 4 :]))
    assert OP.guard(static)(OP.Call(q, k, positions, table, False)) == 4
    for arguments in (
        (q, None, positions, table),
        (q, k, positions, table, True),
        (q, q.clone(), positions, table),
    ):
        with pytest.raises(ValueError, match="planned for"):
            OP.guard(static)(OP.Call(*arguments, *(False,)[len(arguments) - 4 :]))


@positional
def swapped_halves(config: Any, q: Any, k: Any, positions: Any, table: Any, interleaved: bool) -> None:
    half = table.shape[1] // 2
    reference(q, k, positions, table.roll(half, 1), interleaved)


@positional
def other_style(config: Any, q: Any, k: Any, positions: Any, table: Any, interleaved: bool) -> None:
    reference(q, k, positions, table, not interleaved)


@positional
def other_direction(config: Any, q: Any, k: Any, positions: Any, table: Any, interleaved: bool) -> None:
    half = table.shape[1] // 2
    reference(q, k, positions, torch.cat([table[:, :half], -table[:, half:]], 1), interleaved)


@positional
def position_off_by_one(config: Any, q: Any, k: Any, positions: Any, table: Any, interleaved: bool) -> None:
    reference(q, k, (positions - 1).clamp(0), table, interleaved)


@positional
def k_forgotten(config: Any, q: Any, k: Any, positions: Any, table: Any, interleaved: bool) -> None:
    reference(q, None, positions, table, interleaved)


@positional
def last_pair_skipped(config: Any, q: Any, k: Any, positions: Any, table: Any, interleaved: bool) -> None:
    original = q.clone()
    reference(q, k, positions, table, interleaved)
    q[..., table.shape[1] - 1] = original[..., table.shape[1] - 1]


@positional
def past_the_rotated_part(config: Any, q: Any, k: Any, positions: Any, table: Any, interleaved: bool) -> None:
    reference(q, k, positions, table, interleaved)
    q[..., -1] = 0


FAULTS = [
    "swapped_halves",
    "other_style",
    "other_direction",
    "position_off_by_one",
    "k_forgotten",
    "last_pair_skipped",
    "past_the_rotated_part",
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("style", ["neox", "gptj"])
def test_verification_catches_wrong_kernels(fault: str, style: str) -> None:
    problem = f"t=9,hq=3,hk=2,d=40,rot=24,style={style},x=bf16"
    assert not verify_fault("rotary_embedding", __name__, fault, problem).ok


def test_operator(policy_file: Any) -> None:
    policy_file()
    q, k, positions, table = _arguments(4, 2, 1, 16, 16, torch.float32)
    expected = [q.clone(), k.clone()]
    reference(*expected, positions, table, True)
    ops.rotary_embedding(q, k, positions, table, interleaved=True)
    assert _within_tolerance([q, k], expected, "t=4,hq=2,hk=1,d=16,rot=16,style=gptj,x=fp32")
    torch.library.opcheck(torch.ops.gristmill.rotary_embedding.default, (q, k, positions, table))
    torch.library.opcheck(torch.ops.gristmill.rotary_embedding.default, (q, None, positions, table, True))
