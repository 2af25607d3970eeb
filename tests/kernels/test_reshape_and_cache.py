"""reshape_and_cache and its MLA form: agreement with a plain loop, cache strides, slots, refusals, planted
faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill import ops
from gristmill.kernels.kv_cache import reshape_and_cache, reshape_and_cache_mla
from tests.calls import positional
from tests.kernels.running import Runnable, runnables, verify_fault

SLOTS = torch.tensor([5, -1, 0, 13, -7, 2])


def _loop(tokens: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Performs the operation one token at a time, on a copy."""
    cache = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            cache[slot // cache.shape[1], slot % cache.shape[1]] = tokens[token]
    return cache


def _caches(order: str, heads: int, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the NHD views of keys and values in one allocation, for four blocks of four tokens."""
    shape = {
        "two halves": (2, 4, 4, heads, d),
        "block by block": (4, 2, 4, heads, d),
        "heads outside": (2, 4, heads, 4, d),
    }
    allocation = torch.randn(shape[order])
    if order == "block by block":
        return allocation[:, 0], allocation[:, 1]
    if order == "heads outside":
        return allocation[0].transpose(1, 2), allocation[1].transpose(1, 2)
    return allocation[0], allocation[1]


@pytest.mark.parametrize("implementation", runnables("reshape_and_cache"), ids=str)
@pytest.mark.parametrize("order", ["two halves", "block by block", "heads outside"])
def test_every_order_of_the_cache_and_strided_tokens(implementation: Runnable, order: str) -> None:
    qkv = torch.randn(6, 5 * 20)
    key, value = qkv[:, 20:60].view(6, 2, 20), qkv[:, 60:].view(6, 2, 20)
    key_cache, value_cache = _caches(order, 2, 20)
    expected = _loop(key, key_cache, SLOTS), _loop(value, value_cache, SLOTS)
    implementation(key, value, key_cache, value_cache, SLOTS)
    assert torch.equal(key_cache, expected[0]) and torch.equal(value_cache, expected[1])


@pytest.mark.parametrize("implementation", runnables("reshape_and_cache"), ids=str)
def test_heads_of_keys_and_values_may_differ_in_size(implementation: Runnable) -> None:
    key, value = torch.randn(6, 3, 24).half(), torch.randn(6, 3, 10).half()
    key_cache, value_cache = torch.randn(5, 3, 3, 24).half(), torch.randn(5, 3, 3, 10).half()
    expected = _loop(key, key_cache, SLOTS), _loop(value, value_cache, SLOTS)
    implementation(key, value, key_cache, value_cache, SLOTS)
    assert torch.equal(key_cache, expected[0]) and torch.equal(value_cache, expected[1])


@pytest.mark.parametrize("implementation", runnables("reshape_and_cache_mla"), ids=str)
def test_latents_from_a_slice_into_a_cache_of_layers(implementation: Runnable) -> None:
    latent = torch.randn(6, 100).bfloat16()[:, 30:88]
    layers = torch.randn(5, 2, 3, 58).bfloat16()
    before = layers.clone()
    expected = _loop(latent, layers[:, 1], SLOTS)
    implementation(latent, layers[:, 1], SLOTS)
    assert torch.equal(layers[:, 1], expected) and torch.equal(layers[:, 0], before[:, 0])


@pytest.mark.parametrize("implementation", runnables("reshape_and_cache_mla"), ids=str)
def test_nothing_is_written_when_every_slot_is_negative(implementation: Runnable) -> None:
    cache = torch.randn(2, 3, 8)
    before = cache.clone()
    implementation(torch.randn(4, 8), cache, torch.full((4,), -1))
    assert torch.equal(cache, before)


@pytest.mark.parametrize("implementation", runnables("reshape_and_cache_mla"), ids=str)
@pytest.mark.parametrize("slot", [12, 2**40])
def test_a_slot_past_the_cache_is_never_written(implementation: Runnable, slot: int) -> None:
    """A CPU kernel raises and writes nothing. Triton, which cannot raise without synchronizing, skips the
    token."""
    around = torch.zeros(6, 3, 8)
    cache, latent = around[1:5], torch.ones(2, 8)
    slots = torch.tensor([slot, 1])
    if implementation.kernel.language == "triton":
        implementation(latent, cache, slots)
        assert around.count_nonzero() == 8 and (cache[0, 1] == 1).all()
    else:
        with pytest.raises(ValueError, match=f"slot {slot} is past the cache of 12 slots"):
            implementation(latent, cache, slots)
        assert around.count_nonzero() == 0


@pytest.mark.parametrize("implementation", runnables("reshape_and_cache_mla"), ids=str)
def test_offsets_are_64_bits_wide(implementation: Runnable) -> None:
    """Blocks are 2^30 elements apart; only the pages that are written occupy memory."""
    flat = torch.empty(4 * 2**30, dtype=torch.bfloat16)
    cache, latent = flat.view(4, 2**15, 2**15)[:, :3, :8], torch.arange(16.0).view(2, 8).bfloat16()
    implementation(latent, cache, torch.tensor([11, 4]))
    assert torch.equal(cache[3, 2], latent[0]) and torch.equal(cache[1, 1], latent[1])


def test_refusals_and_guards() -> None:
    key, value = torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    key_cache, value_cache = torch.randn(4, 4, 2, 8), torch.randn(4, 4, 2, 8)
    cases: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (
            ValueError,
            r"key must be \[t, h, d\]",
            (key[0], value, key_cache, value_cache, SLOTS),
        ),
        (ValueError, r"key_cache must be \[blocks", (key, value, key_cache[:, :, :1], value_cache, SLOTS)),
        (ValueError, r"value_cache must be \[blocks", (key, value, key_cache, value_cache[..., :7], SLOTS)),
        (
            ValueError,
            r"value must be \[t, h, dv\] = \[6, 2, 8\]",
            (key, value[:5], key_cache, value_cache, SLOTS),
        ),
        (
            ValueError,
            r"value_cache must be \[blocks, block_size, h, dv\] = \[4, 4, 2, 8\]",
            (key, value, key_cache, value_cache[:3], SLOTS),
        ),
        (
            TypeError,
            "key_cache must have key's dtype torch.float32 or torch.float8_e4m3fn",
            (key, value, key_cache.half(), value_cache, SLOTS),
        ),
        (TypeError, "slot_mapping must be torch.int64", (key, value, key_cache, value_cache, SLOTS.int())),
        (ValueError, r"slot_mapping must be \[t\] = \[6\]", (key, value, key_cache, value_cache, SLOTS[:5])),
        (
            ValueError,
            "slot_mapping must be contiguous",
            (key, value, key_cache, value_cache, torch.arange(12)[::2]),
        ),
        (
            ValueError,
            "key_cache is written, so its elements must not overlap",
            (key, value, key_cache[:, :1].expand(4, 4, 2, 8), value_cache, SLOTS),
        ),
        (
            ValueError,
            "key_cache must be contiguous in its last dimension",
            (key, value, torch.randn(4, 4, 8, 2).transpose(2, 3), value_cache, SLOTS),
        ),
    ]
    static = reshape_and_cache.OP.static(reshape_and_cache.OP.problem("h=2,d=8,dv=8,block_size=4,x=fp32"))
    for kind, message, arguments in cases:
        with pytest.raises(kind, match=message):
            ops.reshape_and_cache(*arguments)
        with pytest.raises(
            ValueError, match=f"planned for h=2,d=8,dv=8,block_size=4,x=fp32: {message.partition(' ')[0]}"
        ):
            reshape_and_cache.OP.guard(static)(reshape_and_cache.OP.Call(*arguments))
    assert (
        reshape_and_cache.OP.guard(static)(
            reshape_and_cache.OP.Call(key, value, key_cache, value_cache, SLOTS)
        )
        == 6
    )
    with pytest.raises(ValueError, match="planned for"):
        reshape_and_cache.OP.guard(static)(
            reshape_and_cache.OP.Call(key, value, key_cache[:, :3], value_cache[:, :3], SLOTS)
        )
    latent, cache = torch.randn(6, 8), torch.randn(4, 4, 8)
    static = reshape_and_cache_mla.OP.static(reshape_and_cache_mla.OP.problem("d=8,block_size=4,x=fp32"))
    assert reshape_and_cache_mla.OP.guard(static)(reshape_and_cache_mla.OP.Call(latent, cache, SLOTS)) == 6
    for wrong in (
        (latent[:, :7], cache, SLOTS),
        (latent.half(), cache, SLOTS),
        (latent, cache[:, :2], SLOTS),
    ):
        with pytest.raises((ValueError, TypeError)):
            reshape_and_cache_mla.OP.guard(static)(reshape_and_cache_mla.OP.Call(*wrong))


@positional
def off_by_one(config: Any, *arguments: Any) -> None:
    *rest, slots, k_scale, v_scale = arguments
    reshape_and_cache.reference(*rest, torch.where(slots >= 0, slots + 1, -1), k_scale, v_scale)


@positional
def padding_written(config: Any, *arguments: Any) -> None:
    *rest, slots, k_scale, v_scale = arguments
    reshape_and_cache.reference(*rest, slots.clamp(0), k_scale, v_scale)


@positional
def swapped(config: Any, key: Any, value: Any, *rest: Any) -> None:
    reshape_and_cache.reference(value, key, *rest)


@positional
def last_token_forgotten(config: Any, *arguments: Any) -> None:
    *rest, slots, k_scale, v_scale = arguments
    slots = slots.clone()
    slots[(slots >= 0).nonzero()[-1]] = -1
    reshape_and_cache.reference(*rest, slots, k_scale, v_scale)


@positional
def values_forgotten(config: Any, key: Any, value: Any, key_cache: Any, value_cache: Any, *rest: Any) -> None:
    reshape_and_cache.reference(key, value, key_cache, value_cache.clone(), *rest)


@positional
def block_and_place_swapped(
    config: Any, key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, *scales: Any
) -> None:
    size, blocks = key_cache.shape[1], key_cache.shape[0]
    other = torch.where(slots >= 0, slots % blocks * size + slots // blocks % size, slots)
    reshape_and_cache.reference(key, value, key_cache, value_cache, other, *scales)


FAULTS = [
    "off_by_one",
    "padding_written",
    "swapped",
    "last_token_forgotten",
    "values_forgotten",
    "block_and_place_swapped",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_verification_catches_wrong_kernels(fault: str) -> None:
    assert not verify_fault(
        "reshape_and_cache", __name__, fault, "t=33,h=2,d=16,dv=16,block_size=5,x=bf16"
    ).ok


@positional
def last_element_forgotten(config: Any, latent: Any, cache: Any, slots: Any) -> None:
    original = cache[..., -1].clone()
    reshape_and_cache_mla.reference(latent, cache, slots)
    cache[..., -1] = original


def test_verification_catches_a_short_copy() -> None:
    assert not verify_fault(
        "reshape_and_cache_mla", __name__, "last_element_forgotten", "t=9,d=33,block_size=3,x=bf16"
    ).ok


def test_operators(policy_file: Any) -> None:
    policy_file()
    key, value = torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    key_cache, value_cache = torch.randn(4, 4, 2, 8), torch.randn(4, 4, 2, 8)
    expected = _loop(key, key_cache, SLOTS), _loop(value, value_cache, SLOTS)
    ops.reshape_and_cache(key, value, key_cache, value_cache, SLOTS)
    assert torch.equal(key_cache, expected[0]) and torch.equal(value_cache, expected[1])
    torch.library.opcheck(
        torch.ops.gristmill.reshape_and_cache.default, (key, value, key_cache, value_cache, SLOTS)
    )
    torch.library.opcheck(
        torch.ops.gristmill.reshape_and_cache_mla.default, (key[:, 0], key_cache[:, :, 0].contiguous(), SLOTS)
    )
