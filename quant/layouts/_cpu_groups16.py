"""Packing of cpu_groups16_v1: integer groups, and scales as integers times a factor where they are such products."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.quant import memory, numeric
from gristmill.quant.layouts._common import empty
from gristmill.quant.layouts._cpu_rows16 import _by_block as by_block
from gristmill.quant.layouts._cpu_rows16 import _by_row as by_row
from gristmill.quant.layouts._cpu_rows16 import _deinterleave as deinterleave
from gristmill.quant.layouts._cpu_rows16 import _interleave as interleave
from gristmill.quant.layouts._cpu_rows16 import pack as pack_rows16
from gristmill.quant.layouts.args import FACTORS
from gristmill.quant.layouts.cpu_groups16_v1 import ROWS, RUN, holds
from gristmill.quant.native import packing_function
from gristmill.quant.packed import LayoutError, Packed
from gristmill.quant.tensor import QuantTensor

NAME = "cpu_groups16_v1"
_HIGH = {5: (4, 32), 6: (2, 16)}
"""Lines of low bits, and columns, that share a line of high bits."""
_CHUNK = 1 << 20


def pack(weight: QuantTensor) -> Packed:
    """A copy in the interleaved order.

    Raises:
        LayoutError: experts, act-order, or columns that are not whole groups.
    """
    scheme, k = weight.scheme, weight.k
    scales = weight.scales
    if not holds(scheme) or scales is None:
        raise LayoutError(
            NAME, f"{NAME} holds integer groups of 4, 5, 6 or 8 bits without zero points, not {scheme}"
        )
    if weight.lead or weight.g_idx is not None or k % (scheme.group_size or 1):
        raise LayoutError(
            NAME, f"{NAME} holds one matrix with columns in order and whole groups, not {weight}"
        )
    if scheme.bits in (4, 8):
        plain = QuantTensor(
            weight.codes,
            torch.ones(weight.n, 1, dtype=torch.float32, device=weight.device),
            weight.shape,
            QuantScheme.integer(scheme.bits, None),
        )
        codes = pack_rows16(plain).slots["codes"][:, : k * scheme.bits // 32]
    else:
        codes = _codes(weight)
    values, factors = _factored(scales, scheme)
    slots = {
        "codes": codes,
        "scales": by_block(values, 1),
        "offsets": empty(torch.float32, weight.device),
        "factors": factors,
        "offset_factors": empty(torch.float32, weight.device),
    }
    if weight.zero is not None:
        offsets, slots["offset_factors"] = _factored(weight.zero, scheme)
        slots["offsets"] = by_block(offsets, 0)
    return Packed(NAME, scheme, weight.shape, slots, weight.segments)


def _codes(weight: QuantTensor) -> Tensor:
    """Lines of codes of 5 or 6 bits."""
    bits, (n, k) = weight.scheme.bits, weight.shape
    shared, columns = _HIGH[bits]
    steps = columns // 4
    shape = (cdiv(n, ROWS), k // 8 + k // columns, 64)
    on_cpu = weight.device.type == "cpu"
    out = memory.parameter(shape, torch.uint8) if on_cpu else weight.codes.new_empty(shape)
    shifts = torch.arange(steps, dtype=torch.uint8, device=weight.device) * (bits - 4)
    step = max(ROWS, _CHUNK // k // ROWS * ROWS)
    for start in range(0, n, step):
        codes = numeric.unpack_bits(weight.codes[start : start + step], bits, k)
        low = interleave(codes & 15, 4, 0)
        fields = (codes >> 4).unflatten(-1, (-1, steps, 4)) << shifts[:, None]
        high = interleave(fields.sum(-2, dtype=torch.uint8).flatten(-2), 8, 0)
        both = torch.cat((low.unflatten(1, (-1, shared)), high[:, :, None]), 2).flatten(1, 2)
        out[start // ROWS : start // ROWS + both.shape[0]] = both
    return out


def _factored(values: Tensor, scheme: QuantScheme) -> tuple[Tensor, Tensor]:
    """float32 [N, G] -> int8 [N, G] and float32 factors [B, S, 16], whose products they are, bit for bit; or as they are, and empty."""
    none = empty(torch.float32, values.device)
    per = RUN // (scheme.group_size or RUN)
    if values.dtype != torch.float32 or not per or RUN % (scheme.group_size or 1) or values.shape[-1] % per:
        return values, none
    runs = values.contiguous().view(-1, per)
    native = packing_function("gm_group_factors", FACTORS) if values.device.type == "cpu" else None
    factors = torch.empty(runs.shape[0], dtype=torch.float32)
    integers = torch.empty(runs.shape, dtype=torch.int8)
    exact = torch.zeros(1, dtype=torch.int32)
    if native is not None:
        native(
            values=runs.data_ptr(),
            runs=runs.shape[0],
            per=per,
            factors=factors.data_ptr(),
            integers=integers.data_ptr(),
            exact=exact.data_ptr(),
        )
        if not int(exact):
            return values, none
    else:
        found = factor_runs(runs)
        if found is None:
            return values, none
        factors, integers = found
    return integers.view(values.shape), by_block(factors.view(values.shape[0], -1), 0.0)


def factor_runs(runs: Tensor) -> tuple[Tensor, Tensor] | None:
    """float32 [R, G] -> factors [R] and int8 [R, G] with runs = factors * integers, bit for bit; None if there are none.

    The factor is the greatest common divisor, in units of 2^-24, of which every product of a float16 and an integer is a multiple.
    """
    units = runs.double() * 2.0**24
    if not bool((units == units.round()).all()) or float(units.abs().amax()) >= 2.0**53:
        return None
    whole = units.to(torch.int64)
    divisor = whole[:, 0].abs()
    for column in whole.unbind(1):
        divisor = torch.gcd(divisor, column.abs())
    integers = whole // divisor.clamp(min=1)[:, None]
    # Q6_K's largest scale is -128 times a float of either sign.
    sign = torch.where((integers == 128).any(1), -1, 1)
    integers = integers * sign[:, None]
    factors = ((divisor * sign).double() * 2.0**-24).float()
    if int(integers.amin()) < -128 or int(integers.amax()) > 127:
        return None
    return (factors, integers.to(torch.int8)) if torch.equal(factors[:, None] * integers, runs) else None


def _spread(values: Tensor, factors: Tensor, n: int) -> Tensor:
    """Inverse of `_factored` and of the order of blocks: [N, G]."""
    rows = by_row(values, n)
    if not factors.numel():
        return rows
    per_run = by_row(factors, n)
    return rows.float() * per_run.repeat_interleave(rows.shape[1] // per_run.shape[1], 1)


def unpack(packed: Packed) -> QuantTensor:
    """Inverse of pack."""
    slots, scheme, (n, k) = packed.slots, packed.scheme, packed.shape
    codes = numeric.pack_bits(_row_codes(slots["codes"], scheme, k)[:n].contiguous(), scheme.bits)
    scales = _spread(slots["scales"], slots["factors"], n)
    zero = _spread(slots["offsets"], slots["offset_factors"], n) if slots["offsets"].numel() else None
    return QuantTensor(codes, scales, packed.shape, scheme, zero, None, packed.segments)


def _row_codes(lines: Tensor, scheme: QuantScheme, k: int) -> Tensor:
    """Lines [B, L, 64] -> codes one per byte [16 B, K]."""
    if scheme.bits in (4, 8):
        return deinterleave(lines, scheme.bits)[:, :k]
    shared, columns = _HIGH[scheme.bits]
    runs = lines.unflatten(1, (-1, shared + 1))
    low = deinterleave(runs[:, :, :shared].flatten(1, 2), 4)
    fields = deinterleave(runs[:, :, shared], 8).unflatten(-1, (-1, 1, 4))
    width = scheme.bits - 4
    shifts = torch.arange(columns // 4, dtype=torch.uint8, device=lines.device) * width
    high: Tensor = ((fields >> shifts[:, None]) & ((1 << width) - 1)).flatten(-3)
    return low | (high << 4)


def rows(packed: Packed, index: Tensor) -> Tensor:
    """The rows of a weight that an int64 tensor [T] names, float32 [T, K]."""
    slots, scheme, k = packed.slots, packed.scheme, packed.shape[-1]
    block, lane = index // ROWS, index % ROWS
    codes = _row_codes(_word_lines(slots["codes"], block, lane), scheme, k)[::ROWS]

    def of_rows(values: Tensor, factors: Tensor) -> Tensor:
        found = values[block, :, lane].float()
        if factors.numel():
            by = factors[block, :, lane]
            found = found * by.repeat_interleave(found.shape[1] // by.shape[1], 1)
        return found.repeat_interleave(scheme.group_size or k, 1)

    values = (codes.float() - scheme.implicit_zero) * of_rows(slots["scales"], slots["factors"])
    if slots["offsets"].numel():
        values -= of_rows(slots["offsets"], slots["offset_factors"])
    return values


def _word_lines(lines: Tensor, block: Tensor, lane: Tensor) -> Tensor:
    """The words of single rows as lines whose first row they are: [T, L, 64]."""
    words = lines.view(torch.int32)[block, :, lane]
    padded: Tensor = pad(words[..., None], (0, ROWS - 1))
    return padded.view(torch.uint8)
