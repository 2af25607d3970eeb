"""Layouts: the documented order read back by hand, exact inverses for every form of a weight, sizes,
corruption."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gristmill.kernel_registry.layout import Layout
from gristmill.kernel_registry.scheme import ALL_WEIGHT_SCHEMES, QuantScheme
from gristmill.quant import Packed, QuantTensor, numeric, pack, quantize, unpack
from gristmill.quant.layouts.cpu_rows16_v1 import LAYOUT as ROWS16
from gristmill.quant.layouts.dense_v1 import LAYOUT as DENSE
from gristmill.quant.layouts.plain_v1 import LAYOUT as PLAIN
from gristmill.quant.tensor import scales_to_float32
from tests.quant.oracle import QUANTIZED, act_order, variants, weight

LAYOUTS = (DENSE, PLAIN, ROWS16)
CASES = [(layout, name) for layout in LAYOUTS for name in layout.schemes]


@pytest.mark.parametrize("layout, name", CASES, ids=lambda v: v if isinstance(v, str) else v.name)
def test_unpack_is_the_exact_inverse(layout: Layout, name: str) -> None:
    for q in variants(name):
        packed = pack(q, layout)
        assert tuple(packed.slots) == layout.slots
        assert all(t.is_contiguous() for t in packed.tensors)
        assert unpack(packed).identical(q), q


@pytest.mark.parametrize("layout, name", CASES, ids=lambda v: v if isinstance(v, str) else v.name)
def test_bytes_are_counted(layout: Layout, name: str) -> None:
    for n, k in ((37, 256), (16, 128), (129, 384)):
        assert pack(quantize(weight(n, k), name), layout).nbytes == layout.nbytes(name, n, k)
    # a large weight takes at most 5 % more than the neutral tensor, which is what a plan may spend
    assert layout.nbytes(name, 4096, 4096) <= 1.05 * QuantScheme.parse(name).weight_bytes(4096, 4096)


def finish(
    q: QuantTensor, values: torch.Tensor, s: dict[str, torch.Tensor], perm: torch.Tensor
) -> torch.Tensor:
    """Converts [N, K'] columns as packed to [N, K] of the weight."""
    assert not bool(values.isnan().any())
    if not perm.numel():
        return values[:, : q.k]
    out = torch.full((q.n, q.k), float("nan"))
    for packed_column, column in enumerate(perm.tolist()):
        if column >= 0:
            out[:, column] = values[:, packed_column]
        else:
            assert not bool(values[:, packed_column].any())
    return out


def value_of(q: QuantTensor, code: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    if q.scheme.is_integer:
        return code.float() - (q.scheme.implicit_zero if zero is None else zero.float())
    return numeric.e2m1_decode(code) if q.scheme.bits == 4 else numeric.e4m3_decode(code)


def read_plain(q: QuantTensor, packed: Packed) -> torch.Tensor:
    """Reads the weight from plain_v1's slots by its documentation alone, column by column."""
    s, scheme = packed.slots, q.scheme
    columns = s["perm"].numel() or q.k
    codes = numeric.unpack_bits(s["codes"], scheme.bits, columns)
    out = torch.empty(q.n, columns)
    for k in range(columns):
        g = k // scheme.group_size if scheme.group_size else 0
        scale = scales_to_float32(s["scales"])[:, g]
        if s["row_block"].numel():
            scale = scale[s["row_block"].long()]
        zero = s["zeros"][:, g] if s["zeros"].numel() else None
        out[:, k] = value_of(q, codes[:, k].contiguous(), zero) * scale
    if s["row_scale"].numel():
        out *= s["row_scale"][:, None]
    return finish(q, out, s, s["perm"])


def read_rows16(q: QuantTensor, packed: Packed) -> torch.Tensor:
    """Reads the weight from cpu_rows16_v1's slots by its documentation alone, 32-bit word by 32-bit word."""
    s, bits, group = packed.slots, q.scheme.bits, q.scheme.group_size
    words = s["codes"].view(torch.int32).long() & 0xFFFFFFFF  # [B, words, 16]
    assert words.shape[-1] == 16
    per_word = 32 // bits
    out = torch.empty(words.shape[0] * 16, words.shape[1] * per_word)
    for w in range(words.shape[1]):
        for j in range(per_word):
            k = w * per_word + j
            shift = 8 * (j % 4) + 4 * (j // 4) if bits == 4 else bits * j
            code = (words[:, w, :] >> shift) & ((1 << bits) - 1)  # [B, 16]
            g = k // group if group else 0
            zero = s["zeros"][:, g] if s["zeros"].numel() else None
            value = value_of(q, code.to(torch.uint8), zero) * scales_to_float32(s["scales"])[:, g]
            if s["row_scale"].numel():
                value = value * s["row_scale"]
            out[:, k] = value.flatten()
    assert not bool(out[q.n :].any()) and (bool(s["perm"].numel()) or not bool(out[:, q.k :].any()))
    return finish(q, out[: q.n], s, s["perm"])


@pytest.mark.parametrize("name", QUANTIZED)
def test_slots_mean_what_the_layout_says(name: str) -> None:
    for q in (v for v in variants(name) if not v.lead):
        assert torch.equal(read_plain(q, pack(q, PLAIN)), q.dequantize()), q
        assert torch.equal(read_rows16(q, pack(q, ROWS16)), q.dequantize()), q


@pytest.mark.parametrize("fault", ["scale", "nibbles", "rows", "perm"])
def test_planted_faults_are_seen(fault: str) -> None:
    q = quantize(weight(37, 256, 3), "int4_g64", g_idx=act_order("int4_g64", 256))
    for layout, read in ((PLAIN, read_plain), (ROWS16, read_rows16)):
        packed = pack(q, layout)
        slots = {name: t.clone() for name, t in packed.slots.items()}
        if fault == "scale":
            slots["scales"].view(-1)[5] *= 2
        elif fault == "nibbles":
            slots["codes"] = (slots["codes"] << 4) | (slots["codes"] >> 4)
        elif fault == "rows":
            slots["codes"] = slots["codes"].flip(-2)
        else:
            slots["perm"] = slots["perm"].flip(0)
        assert not torch.equal(read(q, dataclasses.replace(packed, slots=slots)), q.dequantize())


def test_dense_rows16_is_the_operand_of_bf16_dot_products() -> None:
    w = weight(18, 35)
    lines = pack(QuantTensor.from_dense(w.bfloat16()), ROWS16).slots["codes"]
    assert lines.shape == (2, 32, 64)
    view = lines.view(torch.bfloat16).view(2, 32, 16, 2)  # [block, pair, row, half]
    for n, k in ((0, 0), (3, 7), (17, 34), (16, 33)):
        assert view[n // 16, k // 2, n % 16, k % 2] == w[n, k].bfloat16()
    assert not view[1, :, 2:].any() and not view[:, 18:].any()
    single = pack(QuantTensor.from_dense(w), ROWS16).slots["codes"].view(torch.float32)
    assert single.shape == (2, 64, 16) and single[1, 34, 1] == w[17, 34]


def test_act_order_is_a_gather_of_whole_groups() -> None:
    g_idx = act_order("int4_g32", 128)
    q = quantize(weight(5, 128), "int4_g32", g_idx=g_idx)
    perm = pack(q, PLAIN).slots["perm"]
    assert perm.dtype == torch.int32 and torch.equal(perm.long(), torch.argsort(g_idx, stable=True))
    part = q.narrow(1, 3, 100)  # groups of unequal sizes
    packed = pack(part, PLAIN)
    perm = packed.slots["perm"]
    assert perm.numel() == 32 * packed.slots["scales"].shape[-1] and int((perm >= 0).sum()) == 100
    for run in perm.view(-1, 32):
        assert part.g_idx[run[run >= 0].long()].unique().numel() == 1


def test_a_group_larger_than_its_size_takes_several_runs() -> None:
    g_idx = torch.zeros(128, dtype=torch.int32)
    g_idx[[5, 90]] = 3
    q = quantize(weight(5, 128), "int4_g32_zp", g_idx=g_idx)
    for layout, read in ((PLAIN, read_plain), (ROWS16, read_rows16)):
        packed = pack(q, layout)
        assert packed.run_groups == (0, 0, 0, 0, 1, 2, 3)
        assert unpack(packed).identical(q) and torch.equal(read(q, packed), q.dequantize())


def test_float_zeros_survive() -> None:
    q = quantize(weight(5, 128), "int4_g32_zp", g_idx=act_order("int4_g32", 128))
    offset = dataclasses.replace(q, zero=q.zero.float() + 0.25)
    for layout, read in ((PLAIN, read_plain), (ROWS16, read_rows16)):
        assert unpack(pack(offset, layout)).identical(offset)
        assert torch.equal(read(offset, pack(offset, layout)), offset.dequantize())


def test_fp16_scales_of_checkpoints_are_kept() -> None:
    q = quantize(weight(21, 128), "int4_g32")
    half = dataclasses.replace(q, scales=q.scales.half())
    for layout in (PLAIN, ROWS16):
        packed = pack(half, layout)
        assert packed.slots["scales"].dtype == torch.float16 and unpack(packed).identical(half)


def test_contradicting_slots_are_refused() -> None:
    fused = quantize(weight(300, 128), "nvfp4", segments=(0, 130))
    packed = pack(fused, PLAIN)
    slots = {name: t.clone() for name, t in packed.slots.items()}
    slots["row_scale"][7] *= 2
    with pytest.raises(ValueError, match="share a segment's multiplier"):
        unpack(dataclasses.replace(packed, slots=slots))
    packed = pack(quantize(weight(20, 128), "fp8_block"), ROWS16)
    slots = {name: t.clone() for name, t in packed.slots.items()}
    slots["scales"][0, 0, 7] *= 2
    with pytest.raises(ValueError, match="share a block scale"):
        unpack(dataclasses.replace(packed, slots=slots))
    packed = pack(quantize(weight(5, 128), "int4_g32", g_idx=act_order("int4_g32", 128)), PLAIN)
    slots = {name: t.clone() for name, t in packed.slots.items()}
    slots["perm"][0] = slots["perm"][1]
    with pytest.raises(ValueError, match="perm does not name each of 128 columns once"):
        unpack(dataclasses.replace(packed, slots=slots))


def test_a_layout_names_what_it_holds() -> None:
    assert PLAIN.accepts("nvfp4.nvfp4") and not PLAIN.accepts("bf16") and not DENSE.accepts("fp8")
    with pytest.raises(ValueError, match="dense_v1 holds fp32, fp16, bf16, not mxfp4"):
        pack(quantize(weight(5, 128), "mxfp4"), DENSE)
    with pytest.raises(ValueError, match="plain_v1 holds .*, not bf16"):
        PLAIN.nbytes("bf16", 4, 4)
    with pytest.raises(LookupError, match="plain_v9"):
        pack(quantize(weight(5, 128), "mxfp4"), "plain_v9")
    assert pack(quantize(weight(5, 128), "mxfp4"), "plain_v1").layout == "plain_v1"
    with pytest.raises(ValueError, match="no weight scheme called int9_g3"):
        dataclasses.replace(PLAIN, schemes=("int9_g3",))
    with pytest.raises(ValueError, match="module:attr"):
        dataclasses.replace(PLAIN, pack="gristmill.quant")
    assert sorted(ALL_WEIGHT_SCHEMES) == sorted({*DENSE.schemes, *PLAIN.schemes}) == sorted(ROWS16.schemes)


def test_packed_moves() -> None:
    packed = pack(quantize(weight(5, 128), "nvfp4"), PLAIN)
    assert all(t.device.type == "meta" for t in packed.to("meta").tensors)
