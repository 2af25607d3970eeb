"""Writing quantized checkpoints: a Hugging Face directory whose linear weights are in one of the formats of
`gristmill.quant.formats.writers`, gristmill's own unless another is named. Other tensors are copied unchanged, except norms that a
method scales, and config.json gains the format's ``quantization_config``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from gristmill import __version__
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant.checkpoints.checkpoint import FLOATS
from gristmill.quant.checkpoints.files import read_json
from gristmill.quant.checkpoints.safetensors import INDEX, SINGLE, Entry, SafetensorsCheckpoint, read_header
from gristmill.quant.errors import CheckpointError, UsageError
from gristmill.quant.formats import FormatError, Writer, open_format, open_writer
from gristmill.quant.formats.writers import stored_name
from gristmill.quant.writing.unfinished import Unfinished

if TYPE_CHECKING:
    from gristmill.quant.checkpoints.table import Weight, WeightTable
    from gristmill.quant.writing.methods import Method

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Files of a source that are not copied: weights in any format."""
SHARD_BYTES = 2 << 30
"""Models of up to this many bytes are one file; larger ones have one file per layer."""


def write_quantized(
    source: Path,
    out: Path,
    table: WeightTable,
    scheme: QuantScheme,
    progress: Callable[[int, int], None] | None = None,
    form: str = "gristmill",
    method: Method | None = None,
) -> dict[str, Any]:
    """Quantize the linear weights of a model directory and write it, one layer at a time, to `out`.

    `out` is created atomically: layers are written to a hidden folder next to it, which is then renamed. An interrupted run
    leaves that folder, and the same call resumes after its last complete layer, with the same result.

    Args:
        progress: called with (tensors done, total tensors).
        form: the ``quant_method`` of the format.
        method: the rounding method; None = to nearest.

    Returns:
        {"tensors": quantized ones, "bytes_before", "bytes_after", "resumed": layers that existed, "notes": the method's notes on weights that
        it treated differently}.

    Raises:
        UsageError: `out` exists and is not empty, or cannot be written, or was begun with other options; the scheme is dense, the
            format does not support it, or stores experts differently from the model.
        CheckpointError: an invalid source.
    """
    from gristmill.quant.writing.methods import RoundToNearest

    target = _writer(source, table, scheme, form)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not an empty folder: name a new one")
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a model directory: no other checkpoint is quantized to disk")
    checkpoint, config = SafetensorsCheckpoint(source), read_json(source / "config.json")
    if config.get("quantization_config"):
        raise UsageError(f"{source} is quantized already: {config['quantization_config']}")
    shapes = _shapes(table, target.stacked)
    missing = [name for name in shapes if name not in checkpoint]
    if missing:
        raise CheckpointError(f"{source} has no tensor {missing[0]}")
    config["quantization_config"] = target.config(_unquantized_modules(checkpoint, shapes))
    method = method or RoundToNearest()
    identity = {
        "model": str(source.resolve()),
        "source": _fingerprint(checkpoint),
        "quant": str(scheme),
        "format": form,
        "version": __version__,
        **method.identity,
    }
    stored = open_format(config["quantization_config"])
    tensors_done = resumed = 0

    def report(names: Collection[str]) -> None:
        nonlocal tensors_done
        tensors_done += len(names)
        if progress is not None:
            progress(tensors_done, len(checkpoint.entries))

    with Unfinished(out, identity) as unfinished:
        other_names = set(checkpoint)
        for index, weights in enumerate(_layers(table)):
            names = [name for name in _names(weights) if name in checkpoint]
            other_names -= {*names}
            part = unfinished.read(f"{index:05d}")
            if part is None:
                part = _layer(index, weights, names, checkpoint, shapes, target, method)
                unfinished.notes(method.notes)  # first, because a complete layer has no further notes
                unfinished.write(f"{index:05d}", part)
            else:
                resumed += 1
            method.advance(index, part, stored)
            report(names)
        unfinished.write(
            "rest", {name: checkpoint.read(name) for name in sorted(other_names)}
        )  # mapped, not read into memory
        report(other_names)
        notes = unfinished.notes()
        after = _name_files(unfinished)
        (unfinished.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for extra in sorted(source.iterdir()):
            skipped = (
                extra.suffix in WEIGHT_SUFFIXES
                or extra.name.endswith(".index.json")
                or extra.name == "config.json"
            )
            if extra.is_file() and not skipped:
                shutil.copyfile(extra, unfinished.folder / extra.name)
        unfinished.finish()
    before = sum(_bytes(entry) for entry in checkpoint.entries.values())
    return {
        "tensors": len(shapes),
        "bytes_before": before,
        "bytes_after": after,
        "resumed": resumed,
        "notes": notes,
    }


def _writer(source: Path, table: WeightTable, scheme: QuantScheme, form: str) -> Writer:
    if scheme.is_dense:
        raise UsageError(
            f"{scheme} is not a quantized scheme: name one such as int4_g128, fp8_block or nvfp4"
        )
    try:
        target = open_writer(form, scheme)
    except FormatError as error:
        raise UsageError(str(error)) from error
    stacked = any(weight.stacked for weight in table.weights)
    if stacked and not target.stacked:
        raise UsageError(
            f"{source} has its experts in one tensor, which {form} does not hold: write mxfp4 in the format mxfp4"
        )
    if target.stacked and not stacked:
        raise UsageError(
            f"{form} checkpoints hold experts in one tensor, as gpt-oss has them, and {source} has none"
        )
    return target


def _shapes(table: WeightTable, stacked: bool) -> dict[str, tuple[int | None, ...]]:
    """Name and shape of every tensor that is quantized: matrices, or experts in one tensor, as floats [experts, K, N]."""
    if stacked:
        return {w.sources[0]: (w.experts, w.columns, w.rows[0]) for w in table.weights if w.stacked}
    return {
        f"{name}.weight": (weight.rows[index % len(weight.rows)], weight.columns)
        for weight in table.weights
        if weight.kind == "linear"
        for index, name in enumerate(weight.part_names())
    }


def _layers(table: WeightTable) -> list[list[Weight]]:
    """The table's entries by layer."""
    layers: dict[int, list[Weight]] = {}
    for weight in table.weights:
        first, _, following = weight.target.partition(".")
        if first == "layers":
            layers.setdefault(int(following.partition(".")[0]), []).append(weight)
    return [layers[index] for index in sorted(layers)]


def _names(weights: Collection[Weight]) -> list[str]:
    """Checkpoint tensors of these weights."""
    return [
        f"{n}.weight" if weight.kind == "linear" and not weight.stacked else n
        for weight in weights
        for n in weight.part_names()
    ]


def _layer(
    index: int,
    weights: list[Weight],
    names: Collection[str],
    checkpoint: SafetensorsCheckpoint,
    shapes: Mapping[str, Any],
    target: Writer,
    method: Method,
) -> dict[str, Tensor]:
    """The stored tensors of a layer."""
    tensors = {name: checkpoint.read(name, shapes.get(name), dtypes=FLOATS) for name in names}
    try:
        rounded = method.round(index, weights, tensors, target)
    except UsageError:
        raise
    except ValueError as error:
        raise CheckpointError(f"layer {index} of {checkpoint.path}: {error}") from error
    part = {name: rounded.changed.get(name, tensor) for name, tensor in tensors.items() if name not in shapes}
    for module, weight in rounded.weights.items():
        try:
            stored = target.tensors(weight)
        except FormatError as error:
            raise CheckpointError(f"{module}.weight: {error}") from error
        part |= {stored_name(module, suffix): value for suffix, value in stored.items()}
    return part


def _unquantized_modules(checkpoint: SafetensorsCheckpoint, quantized: Collection[str]) -> list[str]:
    """Modules whose matrices remain in floats, without embeddings, which no format counts as linear layers."""
    matrices = (
        n
        for n, e in checkpoint.entries.items()
        if n.endswith(".weight") and len(e.shape) == 2 and n not in quantized
    )
    return [n.removesuffix(".weight") for n in matrices if not n.endswith("embed_tokens.weight")]


def _fingerprint(checkpoint: SafetensorsCheckpoint) -> str:
    """A fingerprint of a source that detects changes: its configuration, and the location, size and date of every tensor."""
    digest = hashlib.sha256((checkpoint.path / "config.json").read_bytes())
    for file in sorted({entry.file for entry in checkpoint.entries.values()}):
        stat = os.stat(file)
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _name_files(unfinished: Unfinished) -> int:
    """Rename parts to the files of a checkpoint, or join them if the model is small. Returns the bytes of all tensors.

    After an interruption here, the run resumes from the parts that are not renamed yet, and writes the others again.
    """
    parts = unfinished.parts()
    headers = [read_header(path) for path in parts]
    total = sum(_bytes(entry) for header in headers for entry in header.values())
    if total <= SHARD_BYTES:
        together = {name: tensor for path in parts for name, tensor in load_file(path).items()}
        save_file(together, unfinished.folder / SINGLE, metadata={"format": "pt"})
        for path in parts:
            path.unlink()
        return total
    weight_map = {}
    for number, (path, header) in enumerate(zip(parts, headers, strict=True), 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        path.rename(unfinished.folder / name)
        weight_map.update(dict.fromkeys(header, name))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (unfinished.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def _bytes(entry: Entry) -> int:
    return entry.dtype.itemsize * math.prod(entry.shape)
