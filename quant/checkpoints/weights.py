"""From a checkpoint to the parameters of a model by a declared table, one tensor at a time, quantized during loading on request.

A model declares its `Weight`s: the checkpoint tensors of each parameter, and their shapes. `Weights` returns each once,
and reports at the end which were never requested and which tensors were never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import QuantTensor, concat, stack
from gristmill.quant.checkpoints.checkpoint import FLOATS, NamedSource
from gristmill.quant.checkpoints.parts import Joined, Part, common_format, quantize_part
from gristmill.quant.checkpoints.shards import (
    LocalRanges,
    Range,
    Shard,
    local_ranges,
    quantizes_rows_independently,
    shard_floats,
    shard_quantized,
)
from gristmill.quant.checkpoints.table import Weight, WeightTable
from gristmill.quant.errors import CheckpointError, UsageError
from gristmill.quant.formats import Format, FormatError
from gristmill.quant.formats.contract import Place, deinterleaved, new_codes, owned
from gristmill.quant.formats.kv_scales import kv_scale_names, kv_scales

HEAD_ROWS = 16384
"""Rows of an embedding that are quantized at a time, which limits temporaries."""


class Weights:
    """Reads the parameters of a table from a checkpoint.

    For a quantized checkpoint the scheme can be the stored one with an activation format, or a float dtype: then weights
    are dequantized. Its tensors in floats stay floats: whoever quantized it left them so. Parameters that the model keeps in floats
    (embedding, logits head, router) are dequantized to their dtype if the checkpoint stores them quantized.

    Args:
        dtype: the dtype of kept and unquantized weights.
        device: the device of the parameters.
        scheme: the scheme to quantize linear weights to at load; None = as stored.
        stored: the format of a quantized checkpoint; None = unquantized.
        head_scheme: the scheme of the embedding and the logits head; None = the model's dtype.
        rank, world: the rank that loads, and the number of ranks; it gets its ranges of every weight.

    Attributes:
        progress: called before each parameter is read, with how many were read before, and how many there are.
        without_cache_scales: attention modules whose quantized cache uses scales of 1.0 because the checkpoint has none.
    """

    def __init__(
        self,
        checkpoint: NamedSource,
        table: WeightTable,
        dtype: torch.dtype,
        device: torch.device,
        scheme: QuantScheme | None = None,
        stored: Format | None = None,
        head_scheme: QuantScheme | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.checkpoint = checkpoint
        self.table = table
        self.dtype = dtype
        self.device = device
        self.scheme = scheme
        self.stored = stored
        self.head_scheme = head_scheme
        self.rank, self.world = rank, world
        self._declared = {weight.target: weight for weight in table.weights}
        self._pending = dict(self._declared)
        self._read: set[str] = set()
        self._others: set[str] = set()  # modules of other ranks' experts
        self._floats: set[str] = set()  # linear modules that a quantized checkpoint stores in floats
        self._in_scheme = False  # whether a stored weight was converted to the scheme
        self.progress: Callable[[int, int], None] | None = None
        self.without_cache_scales: list[str] = []

    def tensor(self, target: str) -> Tensor:
        """A kept parameter, on the device; of experts, [experts, N]."""
        weight = self._take(target)
        local, count = self._local(weight), len(weight.sources)
        names = weight.part_names(local.experts)
        parts = [self._kept(names[i : i + count], weight, local.rows) for i in range(0, len(names), count)]
        joined = torch.stack(parts) if weight.experts else parts[0]
        if weight.interleaved:
            joined = torch.cat((joined[:, 0::2], joined[:, 1::2]), 1)
        placed = joined.to(self.device)
        return (
            placed if placed.untyped_storage().resizable() else placed.clone()
        )  # otherwise it is the mapped file

    def vocabulary(self, target: str) -> Part:
        """The embedding or the logits head [vocab, hidden], on the device: in `head_scheme`, or as it is stored.

        One that the checkpoint stores in that scheme is not rounded again. It is in the model's dtype where a float scheme was requested
        for the weights, and on accelerators if it is stored in a scheme that kernels do not enumerate. Its memory may be a mapped file.
        """
        weight = self._take(target)
        (name,), (rows,), columns = weight.sources, weight.rows, weight.columns
        if columns is None:
            raise KeyError(f"weight {target} of the model's table is a matrix and has no columns")
        scheme, (kept,) = self.head_scheme, self._local(weight).rows
        part = self._stored_matrix(name, (rows, columns))
        if part is not None and (
            part.weight.scheme == scheme if scheme is not None else self._keeps(part.weight)
        ):
            declared = part.declared if self.scheme is None and scheme is None else None
            return Part(shard_quantized(part.weight, kept).to(self.device), None, declared)
        if scheme is not None:
            matrix = self._source(name, (rows, columns), weight) if part is None else part.weight.dequantize()
            if quantizes_rows_independently(scheme):
                matrix, kept = shard_floats(matrix, kept), ((0, sum(b - a for a, b in kept)),)
            pieces = [quantize_part(name, piece, scheme) for piece in matrix.split(HEAD_ROWS)]
            return Part(shard_quantized(concat(pieces, -2), kept).to(self.device))
        matrix = (
            part.weight.dequantize(self.dtype)
            if part is not None
            else self._source(name, (rows, columns), weight)
        )
        return Part(QuantTensor.from_dense(shard_floats(matrix, kept).to(self.device, self.dtype)))

    def _keeps(self, weight: QuantTensor) -> bool:
        """Whether an embedding or a head stays as it is stored."""
        if self.scheme is not None and self.scheme.is_dense:
            return False
        return weight.g_idx is None and (weight.scheme.is_named or self.device.type == "cpu")

    def has(self, target: str) -> bool:
        """Whether the table has a parameter that was not taken yet."""
        return target in self._pending

    def optional(self, target: str) -> Tensor | None:
        """A kept parameter that may be missing in the table, such as a bias."""
        return self.tensor(target) if target in self._pending else None

    def linear(self, target: str) -> QuantTensor:
        """The weight of `linear_part`."""
        return self.linear_part(target).weight

    def linear_part(self, target: str) -> Part:
        """A linear parameter [N, K], or [experts, N, K], on the device: quantized, or dense in the model's dtype, without pre_scale.
        An activation format counts as declared if all its parts and experts declare it.

        Raises:
            CheckpointError: its parts or experts cannot be one tensor as stored.
        """
        weight = self._take(target)
        if weight.stacked:
            return self._on_device(self._stacked(weight))
        local = self._local(weight)
        names, count = weight.part_names(local.experts), len(weight.sources)
        matrices = (self._joined(names[i : i + count], weight) for i in range(0, len(names), count))
        if not weight.experts:
            return self._on_device(next(matrices))
        formats = set()

        def experts() -> Iterator[QuantTensor]:
            for part in matrices:
                formats.add(part.declared)
                yield part.weight.to(self.device)

        try:
            stacked = stack(experts(), local.experts[1] - local.experts[0])
        except UsageError:  # of one of them
            raise
        except ValueError as error:
            raise CheckpointError(
                f"{self.checkpoint.path}: the experts of {target} differ: {error}"
            ) from error
        self._others.update(set(weight.part_names()) - set(names))
        return Part(stacked, None, common_format(formats))

    def parts(self, target: str) -> list[Part]:
        """A linear parameter as one part, or as several if they cannot be one tensor as stored.

        Parts may differ in scheme (rules per layer), in act-order, or in pre_scale. Parts with different global scales
        are joined: each keeps its own.
        """
        weight = self._take(target)
        made, codes = self._gathered(weight.sources, weight)
        first = made[0].pre_scale
        alike = all(
            p.pre_scale is first if first is None or p.pre_scale is None else torch.equal(first, p.pre_scale)
            for p in made
        )
        if alike:
            try:
                declared = common_format({p.declared for p in made})
                return [self._on_device(Part(concat([p.weight for p in made], -2, codes), first, declared))]
            except ValueError:
                pass  # concat cannot be exact; separate parts always are
        return [
            self._on_device(replace(part, weight=part.weight.narrow(0, 0, part.weight.n))) for part in made
        ]

    def cache_scales(self, target: str, kv_heads: int) -> tuple[Tensor, Tensor]:
        """(k_scale, v_scale) of the e4m3 cache of the attention that the linear parameter `target` belongs to, as the operations take
        them: float32 [1, 1, 1], or [1, 1, kv_heads] where the checkpoint has one per head. 1.0 where it has none.

        Raises:
            UsageError: its scales are for another number format.
            CheckpointError: one of the two is missing, or they are not valid scales.
        """
        weight = self._pending[target]
        module = weight.sources[0].rpartition(".")[0]
        try:
            known = kv_scale_names(self.checkpoint)
            names = known.get((module, "k")), known.get((module, "v"))
            if names == (None, None):
                self.without_cache_scales.append(module)
                one = torch.ones(1, 1, 1, dtype=torch.float32, device=self.device)
                return one, one.clone()
            if self.stored is not None and self.stored.kv_cache not in (None, "fp8"):
                raise UsageError(
                    f"{self.checkpoint.path} has scales of a KV cache in {self.stored.kv_cache}, not in fp8; use kv_dtype='fp8_token_head', "
                    "which needs none, or 'auto'"
                )
            keys = Shard(kv_heads, kv_heads) if weight.shard is None else weight.shard.shards[1]
            size = keys.length // keys.heads
            heads = slice(*(edge // size for edge in keys.range(self.rank, self.world)))
            k_scale, v_scale = kv_scales(self.checkpoint, module, names, keys.heads, heads)
        except FormatError as error:
            raise CheckpointError(f"{self.checkpoint.path}: {error}") from error
        self._read.update(name for name in names if name is not None)
        return k_scale.to(self.device), v_scale.to(self.device)

    def check_scheme(self) -> None:
        """UsageError if a scheme was requested that changed nothing: all linear weights of a quantized checkpoint are in floats."""
        if self.stored is None or self.scheme is None or self.scheme.is_dense or self._in_scheme:
            return
        if self._floats:
            raise UsageError(
                f"quant {self.scheme} changes nothing: {self.checkpoint.path} declares the format {self.stored.name}, which leaves every linear "
                f"weight of the model in floats ({_some(self._floats)}), and weights of a quantized checkpoint are not quantized at load; load it "
                "without quant, or take the checkpoint that it was made from"
            )

    def finish(self) -> None:
        """CheckpointError if a parameter was not read, a tensor is left over, or the copy of a tied tensor differs."""
        if self._pending:
            raise CheckpointError(f"parameters left unwritten: {_some(self._pending)}")
        for copy, kept_name in self.table.copies:
            if copy in self.checkpoint and kept_name in self.checkpoint:
                copied, original = (self.checkpoint.read(name) for name in (copy, kept_name))
                alike = (
                    torch.equal(copied, original)
                    if copied.dtype == original.dtype
                    else torch.equal(copied.float(), original.float())
                )
                if not alike:
                    raise CheckpointError(
                        f"{self.checkpoint.path}: config.json ties {copy} to {kept_name}, and they differ: is "
                        "tie_word_embeddings to be false?"
                    )
        known = self._read | self._side_tensors()
        unread = [
            name
            for name in self.checkpoint
            if name not in known
            and name.rpartition(".")[0] not in self._others
            and not self.table.ignores(name)
        ]
        if unread:
            raise CheckpointError(
                f"{self.checkpoint.path} holds tensors that no parameter of the model takes: {_some(unread)}"
            )

    def _side_tensors(self) -> set[str]:
        """Other tensors of quantized checkpoints: scales of a KV cache, which are read if the cache is quantized with them,
        and tensors that the format declares to be irrelevant.
        """
        if self.stored is None:
            return set()
        try:
            names = set(kv_scale_names(self.checkpoint).values())
            return names | self.stored.beside(self.checkpoint, self._read)
        except FormatError as error:
            raise CheckpointError(f"{self.checkpoint.path}: {error}") from error

    def is_partial(self, target: str) -> bool:
        """Whether products with a parameter are partial sums: its columns or its experts are sharded."""
        spec = self._declared[target].shard
        return spec is not None and spec.dim != "rows" and self.world > 1

    def shard_ranges(self, target: str) -> list[Range]:
        """The range of each rank of a parameter with one shard, in the order of the ranks; the whole range if it is replicated."""
        weight, world = self._declared[target], self.world
        if weight.shard is None:
            return [(0, weight.experts or sum(weight.rows))] * world
        return [weight.shard.shards[0].range(rank, world) for rank in range(world)]

    def shapes_of_ranks(self, target: str) -> list[tuple[int, int]]:
        """(rows, columns) that each rank has of a matrix, in the order of the ranks."""
        weight = self._declared[target]
        shapes = []
        for rank in range(self.world):
            local = self._local(weight, rank)
            first, last = local.columns or (0, weight.columns or 0)
            shapes.append((sum(local.row_counts), last - first))
        return shapes

    def _local(self, weight: Weight, rank: int | None = None) -> LocalRanges:
        """What a rank has of a weight; None = this rank."""
        rank = self.rank if rank is None else rank
        try:
            return local_ranges(weight.shard, weight.rows, weight.experts, rank, self.world)
        except UsageError as error:
            raise UsageError(f"tensor_parallel={self.world}: {weight.target}: {error}") from error

    def _take(self, target: str) -> Weight:
        weight = self._pending.pop(target, None)
        if weight is None:
            raise KeyError(f"no weight {target!r} in the model's table, or it was taken before")
        if self.progress is not None:
            self.progress(len(self._declared) - len(self._pending) - 1, len(self._declared))
        return weight

    def _kept(self, names: Sequence[str], weight: Weight, kept: Sequence[tuple[Range, ...]]) -> Tensor:
        """The parts of a kept parameter, or of that of an expert, joined: the `kept` rows of each, in its dtype."""
        dtype = torch.float32 if weight.kind == "fp32" else self.dtype
        parts = []
        for name, rows, of_rank in zip(names, weight.rows, kept, strict=True):
            shape = (rows,) if weight.columns is None else (rows, weight.columns)
            parts.append(shard_floats(self._float_tensor(name, shape, weight), of_rank).to(dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _float_tensor(self, name: str, shape: tuple[int, ...], weight: Weight) -> Tensor:
        """A float tensor, dequantized if the checkpoint stores it quantized."""
        stored = self._stored_matrix(name, shape)
        if stored is not None:
            return stored.weight.dequantize(torch.float32 if weight.kind == "fp32" else self.dtype)
        return self._source(name, shape, weight)

    def _stored_matrix(self, name: str, shape: tuple[int, ...]) -> Part | None:
        """The stored weight of a tensor's name; None if the checkpoint stores it in floats."""
        module = name.removesuffix(".weight")
        if self.stored is None or len(shape) != 2 or module == name:
            return None
        plain = name in self.checkpoint and self.checkpoint.spec(name)[0] in FLOATS
        return None if plain else self._stored(module, shape)

    def _source(self, name: str, shape: tuple[int, ...], weight: Weight) -> Tensor:
        if name not in self.checkpoint:
            raise CheckpointError(
                f"parameter {weight.target} is left unwritten: {self.checkpoint.path} has no tensor {name}"
            )
        self._read.add(name)
        return self.checkpoint.read(name, shape, dtypes=FLOATS)

    def _stored(self, module: str, shape: tuple[int, ...], place: Place = new_codes) -> Part | None:
        """The stored weight of a module in the checkpoint's format; None if it is stored in floats."""
        if self.stored is None:
            return None
        try:
            weight = self.stored.read(self.checkpoint, module, shape, place)
        except FormatError as error:
            raise CheckpointError(f"{self.checkpoint.path}: {error}") from error
        if weight is None:
            return None
        self._read.update(weight.names)
        pre_scale = None if weight.pre_scale is None else weight.pre_scale.to(self.dtype)
        return Part(weight.weight, pre_scale, weight.activation)

    def _part(self, name: str, index: int, weight: Weight, place: Place) -> Part:
        """Part `index` of a matrix, in the rank's share."""
        rows, columns, local = weight.rows[index], weight.columns, self._local(weight)
        if columns is None:
            raise KeyError(f"weight {weight.target} of the model's table is linear and has no columns")
        kept = local.rows[index]
        is_whole = local.columns is None and kept == ((0, rows),)
        stored = self._stored(name, (rows, columns), place if is_whole else new_codes)
        if stored is not None:
            if not is_whole:
                scale = stored.pre_scale
                if scale is not None and local.columns is not None:
                    scale = scale[slice(*local.columns)].clone()
                stored = replace(
                    stored, weight=shard_quantized(stored.weight, kept, local.columns), pre_scale=scale
                )
            return self._converted(name, stored)
        tensor = self._source(f"{name}.weight", (rows, columns), weight)
        scheme = self._rounded_to(name)
        if scheme is None:
            return Part(QuantTensor.from_dense(shard_floats(tensor, kept, local.columns).to(self.dtype)))
        if quantizes_rows_independently(scheme) and local.columns is None:
            return Part(quantize_part(name, shard_floats(tensor, kept), scheme))
        # Rounded whole, so that the codes are those of one rank.
        return Part(shard_quantized(quantize_part(name, tensor, scheme), kept, local.columns))

    def _stacked(self, weight: Weight) -> Part:
        """All experts of a parameter from one tensor."""
        (name,), (rows,), columns = weight.sources, weight.rows, weight.columns
        if columns is None:
            raise KeyError(f"weight {weight.target} of the model's table is linear and has no columns")
        first, last = self._local(weight).experts
        stored = self._stored(name, (weight.experts, rows, columns))
        if stored is not None:
            if last - first < weight.experts:
                stored = replace(stored, weight=stored.weight.narrow(0, first, last - first))
            if weight.interleaved:
                stored = replace(stored, weight=deinterleaved(stored.weight.to(self.device)))
            return self._converted(name, stored)
        tensor = self._source(name, weight.stacked_shape, weight)[first:last]
        tensor = tensor if weight.rows_first else tensor.transpose(1, 2)
        if weight.interleaved:  # before rounding, which may be by blocks of rows
            tensor = torch.cat((tensor[:, 0::2], tensor[:, 1::2]), 1)
        scheme = self._rounded_to(name)
        if scheme is None:
            return Part(QuantTensor.from_dense(torch.empty(tensor.shape, dtype=self.dtype).copy_(tensor)))
        return Part(
            stack(
                (quantize_part(f"{name}[{first + i}]", expert, scheme) for i, expert in enumerate(tensor)),
                last - first,
            )
        )

    def _rounded_to(self, name: str) -> QuantScheme | None:
        """The scheme that a linear module in floats is quantized to at load; None: it stays as it is."""
        if self.stored is not None:
            self._floats.add(name)
            return None
        return None if self.scheme is None or self.scheme.is_dense else self.scheme

    def _converted(self, name: str, part: Part) -> Part:
        """A stored part, converted to the requested scheme."""
        scheme, weight = self.scheme, part.weight
        if scheme is None:
            return part
        self._in_scheme = True
        if scheme.is_dense:
            if part.pre_scale is None:
                return Part(QuantTensor.from_dense(weight.dequantize(self.dtype)))
            return Part(QuantTensor.from_dense((weight.dequantize() * part.pre_scale.float()).to(self.dtype)))
        if scheme.without_activation != weight.scheme:
            raise UsageError(
                f"{self.checkpoint.path} is quantized to {weight.scheme} already ({name}): it cannot be quantized to "
                f"{scheme} at load"
            )
        return replace(part, weight=replace(weight, scheme=scheme), declared=None)

    def _gathered(self, names: Sequence[str], weight: Weight) -> tuple[list[Part], Tensor | None]:
        """The parts of one matrix on the device, with their codes in one tensor if there are several of equal width.

        The codes of each part go to their place when it is read, so that no part is in memory twice.
        """
        rows = self._local(weight).row_counts
        parts, joined = [], Joined(rows, self.device) if len(names) > 1 else None
        floats = (
            self.scheme is not None and self.scheme.is_dense
        )  # the stored part is not the one that is kept
        for index, name in enumerate(names):
            part = self._part(name, index, weight, new_codes if joined is None or floats else joined.place)
            held = part.weight.tensors()
            if joined is not None:
                held["codes"] = joined.put(held["codes"])
            placed = {field: tensor.to(self.device) for field, tensor in held.items()}
            parts.append(replace(part, weight=part.weight.with_tensors(placed, part.weight.shape)))
        return parts, None if joined is None else joined.codes

    def _joined(self, names: list[str], weight: Weight) -> Part:
        """Join the parts of one matrix: of an expert or of a whole parameter."""
        parts, codes = self._gathered(names, weight)
        scaled = next(
            (name for name, part in zip(names, parts, strict=True) if part.pre_scale is not None), None
        )
        if scaled is not None:
            raise CheckpointError(
                f"{self.checkpoint.path}: {scaled} multiplies its input by pre_quant_scale, which is not supported in "
                f"{weight.target}; ask for float weights (quant bf16)"
            )
        try:
            return Part(
                concat([part.weight for part in parts], -2, codes),
                None,
                common_format({p.declared for p in parts}),
            )
        except ValueError as error:
            raise CheckpointError(
                f"{self.checkpoint.path}: {', '.join(names)} are one matrix, and cannot be joined: {error}"
            ) from error

    def _on_device(self, part: Part) -> Part:
        """The part on the device, in separate memory."""
        scale = None if part.pre_scale is None else part.pre_scale.to(self.device)
        return Part(owned(part.weight.to(self.device)), scale, part.declared)


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    suffix = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    return ", ".join(listed[:5]) + suffix
