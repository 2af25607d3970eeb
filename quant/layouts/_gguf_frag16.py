"""Packing of gguf_frag16_v1: the low nibbles and the scales as other frag16 layouts have them, a plane of upper bits, scales as products."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.quant import numeric
from gristmill.quant.layouts import _frag16_scales as tail
from gristmill.quant.layouts._common import Columns, empty, no_perm, sort_columns, unsort_columns
from gristmill.quant.layouts._frag16_codes import block_views, code_tiles, codes_of_tiles
from gristmill.quant.layouts._gguf_factors import factor_rows, products
from gristmill.quant.layouts.gguf_frag16_v1 import FACTORED, LOW_BYTES, code_bytes, tile_bytes
from gristmill.quant.layouts.w4_frag16_v1 import BLOCK_TILES, TILE_K, TILE_ROWS, groups_per_tile
from gristmill.quant.packed import Packed
from gristmill.quant.tensor import QuantTensor

NAME = "gguf_frag16_v1"
_BATCH = 1 << 26
"""Weights reordered at a time, so that scratch memory is small compared to the weight."""


def pack(weight: QuantTensor) -> Packed:
    """A copy of a weight [..., N, K]. ValueError for scales that the layout does not hold."""
    scheme, device = weight.scheme, weight.device
    factored = _check(weight)
    columns = Columns(weight.codes, weight.scales, weight.zero, no_perm(device), None)
    if weight.g_idx is not None:
        columns = sort_columns(weight)
        columns = Columns(
            numeric.pack_bits(columns.codes.contiguous(), scheme.bits),
            columns.scales,
            columns.zero,
            columns.perm,
            columns.run_groups,
        )
    assert columns.scales is not None
    k, size = columns.perm.numel() or weight.k, tile_bytes(scheme, factored)
    count, groups, experts = cdiv(weight.n, TILE_ROWS), cdiv(k, TILE_K), torch.Size(weight.lead).numel()
    tiles = torch.empty(experts, count * groups * size, dtype=torch.uint8, device=device)
    codes, scales = (t.reshape(experts, *t.shape[-2:]) for t in (columns.codes, columns.scales))
    offsets = None if columns.zero is None else columns.zero.reshape(experts, *columns.zero.shape[-2:])
    step = max(1, _BATCH // (groups * TILE_K * BLOCK_TILES * TILE_ROWS)) * BLOCK_TILES
    for expert, out in enumerate(tiles):
        for part, view in block_views(out, count, groups, size):
            for start in range(part.start, part.stop, step):
                rows = slice(start * TILE_ROWS, min(start + step, part.stop) * TILE_ROWS)
                made = _tiles(
                    scheme,
                    numeric.unpack_bits(codes[expert, rows], scheme.bits, k),
                    scales[expert, rows],
                    None if offsets is None else offsets[expert, rows],
                    groups,
                    factored,
                )
                first = (start - part.start) // view.shape[1]
                blocks = view[first : first + cdiv(made.shape[0], view.shape[1])]
                blocks.copy_(made.view(blocks.shape))
    if (
        device.type == "cuda"
    ):  # with PDL kernels may read an immutable weight before earlier work on the stream has ended
        torch.cuda.current_stream(device).synchronize()
    slots = {
        "tiles": tiles.view(*weight.lead, -1),
        "scale_type": empty(columns.scales.dtype, device),
        "perm": columns.perm,
    }
    return Packed(NAME, scheme, weight.shape, slots, weight.segments, columns.run_groups)


def _check(weight: QuantTensor) -> bool:
    """Whether scales are to be stored as products. ValueError for those that the layout does not hold."""
    scheme, scales, zero = weight.scheme, weight.scales, weight.zero
    held = (torch.float16, torch.bfloat16, *((torch.float32,) if scheme.weights in FACTORED else ()))
    if scales is None or scales.dtype not in held:
        expected = ", ".join(str(dtype) for dtype in held)
        raise ValueError(
            f"{NAME} holds scales of {scheme} in {expected}, got {None if scales is None else scales.dtype}; convert them"
        )
    if zero is not None and zero.dtype != scales.dtype:
        raise ValueError(
            f"{NAME} holds offsets in the dtype of the scales, {scales.dtype}, got {zero.dtype}; convert them"
        )
    return scales.dtype == torch.float32


def _tiles(
    scheme: QuantScheme, codes: Tensor, scales: Tensor, offsets: Tensor | None, groups: int, factored: bool
) -> Tensor:
    """Codes [N, K] one per byte and scales [N, S] of whole tiles of rows, the last perhaps in part -> uint8 [T, G, bytes]."""
    n, per_tile = codes.shape[0], groups_per_tile(scheme)
    count = cdiv(n, TILE_ROWS)
    codes = pad(codes, (0, groups * TILE_K - codes.shape[1], 0, count * TILE_ROWS - n))
    parts = [code_tiles(codes & 15, "int4")]
    if scheme.bits > 4:
        parts.append(_high_tiles(codes >> 4, scheme.bits - 4))
    kinds = [scales] if offsets is None else [scales, offsets]
    if factored:
        parts.append(_factor_bytes(kinds, scheme, count, groups))
    else:
        parts += [tail._by_lane(kind, count, groups, per_tile) for kind in kinds]
    return torch.cat(parts, -1)


def _high_tiles(high: Tensor, width: int) -> Tensor:
    """Upper bits of codes, uint8 [16 T, 128 G] -> uint8 [T, G, 256 * width]."""
    tiles, groups, steps = high.shape[0] // TILE_ROWS, high.shape[1] // TILE_K, 4 // width
    # row half, g | tile k: word, step of the word, column half, t, odd -> g, t, word, odd, column half | step, row half
    split = high.view(tiles, 2, 8, groups, 8 // steps, steps, 2, 4, 2).permute(0, 3, 2, 7, 4, 8, 6, 5, 1)
    fields = split.reshape(tiles, groups, 256 * width, 8 // width)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=high.device)
    return (fields << shifts).sum(-1, dtype=torch.uint8)


def _high_codes(plane: Tensor, width: int) -> Tensor:
    """Inverse of _high_tiles."""
    tiles, groups, steps = plane.shape[0], plane.shape[1], 4 // width
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=plane.device)
    fields = (plane[..., None] >> shifts) & ((1 << width) - 1)
    split = fields.view(tiles, groups, 8, 4, 8 // steps, 2, 2, steps, 2).permute(0, 8, 2, 1, 4, 7, 6, 3, 5)
    return split.reshape(tiles * TILE_ROWS, groups * TILE_K)


def _factor_bytes(kinds: list[Tensor], scheme: QuantScheme, count: int, groups: int) -> Tensor:
    """float32 scales (and offsets) [N, S] -> uint8 [T, G, bytes]: d of two rows (and dmin), then bytes of each half of a tile."""
    per_tile, signed = groups_per_tile(scheme), not scheme.minimums
    factors, integers = [], []
    for kind, name in zip(kinds, ("scales", "offsets"), strict=False):
        n, columns = kind.shape
        # Groups past K repeat the last one: a zero there might have another sign than d.
        kept = torch.arange(groups * per_tile, device=kind.device).clamp(max=columns - 1)
        rows = pad(kind[:, kept], (0, 0, 0, count * TILE_ROWS - n))
        found = factor_rows(rows.reshape(-1, per_tile), signed)
        if found is None:
            raise ValueError(
                f"{NAME} holds {name} in float32 only where those of a row's {TILE_K} columns are a float16 times integers of 8 bits, as in "
                f"K-quants; the weight of {scheme} has others: convert them to 16 bits, or use another layout"
            )
        d, whole = found
        # tile, row half, g, group of 128 -> tile, group of 128, g, row half
        factors.append(d.view(count, 2, 8, groups).permute(0, 3, 2, 1))
        octets = (whole + 128 if signed else whole).to(torch.uint8)
        # ... and the tile's half, its groups
        integers.append(octets.view(count, 2, 8, groups, 2, per_tile // 2).permute(0, 3, 2, 4, 5, 1))
    first = torch.stack(factors, -2).contiguous().view(torch.uint8).reshape(count, groups, -1)
    return torch.cat((first, torch.stack(integers, -3).reshape(count, groups, -1)), -1)


def _factored_scales(stored: Tensor, scheme: QuantScheme) -> list[Tensor]:
    """Inverse of _factor_bytes, with its padding: float32 [16 T, S] of each kind."""
    count, groups = stored.shape[:2]
    per_tile, kinds = groups_per_tile(scheme), 2 if scheme.minimums else 1
    cut = TILE_ROWS * 2 * kinds
    d = stored[..., :cut].contiguous().view(torch.float16).view(count, groups, 8, kinds, 2)
    octets = stored[..., cut:].reshape(count, groups, 8, 2, kinds, per_tile // 2, 2).to(torch.int16)
    whole = octets if scheme.minimums else octets - 128
    made = []
    for kind in range(kinds):
        factor = d[..., kind, :].permute(0, 3, 2, 1).reshape(-1)
        integers = whole[..., kind, :, :].permute(0, 5, 2, 1, 3, 4).reshape(-1, per_tile)
        made.append(products(factor, integers).view(count * TILE_ROWS, -1))
    return made


def _stored_scales(stored: Tensor, scheme: QuantScheme, dtype: torch.dtype) -> list[Tensor]:
    """The scales (and offsets) of tiles [T, G, bytes of part 3], with padding: [16 T, S] of each kind."""
    if dtype == torch.float32:
        return _factored_scales(stored, scheme)
    kinds = stored.chunk(2 if scheme.minimums else 1, -1)
    return [tail._by_row(kind, dtype, groups_per_tile(scheme)) for kind in kinds]


def unpack(packed: Packed) -> QuantTensor:
    """Inverse of pack."""
    slots, scheme = packed.slots, packed.scheme
    dtype, perm = slots["scale_type"].dtype, slots["perm"]
    n, k, lead = packed.shape[-2], perm.numel() or packed.shape[-1], packed.shape[:-2]
    size, cut = tile_bytes(scheme, dtype == torch.float32), code_bytes(scheme)
    count, groups = cdiv(n, TILE_ROWS), cdiv(k, TILE_K)
    codes, kinds = [], []
    for stored in slots["tiles"].reshape(-1, count * groups * size):
        whole = torch.empty(count, groups, size, dtype=torch.uint8, device=stored.device)
        for part, view in block_views(stored, count, groups, size):
            whole[part] = view.reshape(part.stop - part.start, groups, size)
        rows = codes_of_tiles(whole[..., :LOW_BYTES], "int4")
        if scheme.bits > 4:
            rows = rows | _high_codes(whole[..., LOW_BYTES:cut], scheme.bits - 4) << 4
        codes.append(rows[:n, :k])
        scales = _stored_scales(whole[..., cut:], scheme, dtype)
        kinds.append(torch.stack([kind[:n, : scheme.groups(k)] for kind in scales]))
    code = torch.stack(codes).view(*lead, n, k)
    both = torch.stack(kinds, 1)
    scale = both[0].reshape(*lead, n, -1)
    zero = both[1].reshape(*lead, n, -1) if scheme.minimums else None
    columns = Columns(code, scale, zero, perm, None)
    if packed.run_groups is not None:
        columns = unsort_columns(code, scale, zero, packed, perm)
    return QuantTensor(
        numeric.pack_bits(columns.codes.contiguous(), scheme.bits),
        columns.scales,
        packed.shape,
        scheme,
        columns.zero,
        None,
        packed.segments,
        columns.perm if packed.run_groups is not None else None,
    )


def rows(packed: Packed, index: Tensor) -> Tensor:
    """The rows of a weight [N, K] that an int64 tensor [T] names, float32 [T, K]: only their words are read."""
    slots, scheme, k = packed.slots, packed.scheme, packed.shape[-1]
    if not index.numel():
        return torch.empty(0, k, dtype=torch.float32, device=index.device)
    dtype, perm = slots["scale_type"].dtype, slots["perm"]
    columns = perm.numel() or k
    size, cut = tile_bytes(scheme, dtype == torch.float32), code_bytes(scheme)
    count, groups = cdiv(packed.shape[-2], TILE_ROWS), cdiv(columns, TILE_K)
    tile, g, r = index // TILE_ROWS, index % 8, index // 8 % 2
    first = tile // BLOCK_TILES * BLOCK_TILES
    at = first * groups + tile - first
    at = (
        at[:, None]
        + torch.arange(groups, device=index.device) * (count - first).clamp(max=BLOCK_TILES)[:, None]
    )
    stored = slots["tiles"].view(-1, size)

    def of_lanes(start: int, stop: int, runs: int) -> Tensor:
        """The bytes of lanes 4 g .. 4 g + 3 in a part of `runs` runs, as [T, G, runs, 4, bytes of a lane]."""
        part: Tensor = stored[:, start:stop].unflatten(1, (runs, 8, 4, -1))
        return part[at, :, g[:, None]]

    # half of the tile, t, step, column half | odd: a word's bits from 4 r on, by 8 and by 16
    words = of_lanes(0, LOW_BYTES, 2).unflatten(-1, (4, 2, 2)) >> (4 * r).view(-1, 1, 1, 1, 1, 1, 1) & 15
    codes = words.permute(0, 1, 2, 4, 6, 3, 5).reshape(-1, groups * TILE_K)
    if scheme.bits > 4:
        width = scheme.bits - 4
        steps = 4 // width
        shift = torch.arange(steps, device=index.device) * 2 * width + (width * r)[:, None]
        # word, odd, column half | step of the word
        octets = of_lanes(LOW_BYTES, cut, 1).view(-1, groups, 4, 8 // steps, 2, 2)
        high = octets[..., None] >> shift.to(torch.uint8).view(-1, 1, 1, 1, 1, 1, steps) & ((1 << width) - 1)
        codes = codes | high.permute(0, 1, 3, 6, 5, 2, 4).reshape(-1, groups * TILE_K) << 4
    values: Tensor = codes.float()
    tails = stored[:, cut:][at]
    own = (torch.arange(len(index), device=index.device) * TILE_ROWS) + index % TILE_ROWS
    kinds = [kind[own].float() for kind in _stored_scales(tails, scheme, dtype)]
    spread = scheme.group_size or 1
    values = (values - scheme.implicit_zero) * kinds[0].repeat_interleave(spread, 1)
    if scheme.minimums:
        values -= kinds[1].repeat_interleave(spread, 1)
    place = torch.argsort(perm, stable=True)[columns - k :].long() if perm.numel() else slice(k)
    return values[:, place]
