"""Writing quantized checkpoints: a Hugging Face directory whose linear weights are in one of the formats of
`gristmill.quant.formats.writers`, gristmill's own unless another is named. Every other tensor is as it was, and config.json
gains the format's ``quantization_config``.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file
from torch import Tensor

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import QuantTensor
from gristmill.quant.formats import FormatError
from gristmill.quant.formats.writers import open_writer
from gristmill.runtime.errors import CheckpointError, UsageError
from gristmill.runtime.loader.checkpoint import FLOATS, INDEX, SINGLE, Checkpoint
from gristmill.runtime.loader.config import read_json

if TYPE_CHECKING:
    from gristmill.runtime.loader.weights import WeightTable

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Files of a source that are not copied: its weights, in any format."""
SHARD_BYTES = 2 << 30
"""Bytes after which a new file is begun: what writing holds in memory at most."""


def write_quantized(
    source: Path,
    out: Path,
    table: WeightTable,
    scheme: QuantScheme,
    progress: Callable[[int, int], None] | None = None,
    form: str = "gristmill",
    rounding: Callable[[str, Tensor, QuantTensor], QuantTensor] | None = None,
) -> dict[str, int]:
    """Quantize the linear weights of a model directory and write it, one tensor at a time, to `out`.

    `out` appears whole or not at all: everything is written to a hidden folder beside it, which then takes its name.
    progress: called with (tensors done, tensors in all). form: the format, by its ``quant_method``. rounding: (module,
    weight, weight rounded to nearest) -> what is written instead. Returns {"tensors": quantized ones, "bytes_before",
    "bytes_after"}.

    Raises:
        UsageError: `out` exists and is not empty, or cannot be written, the scheme is dense, the format does not hold it, or
            the model has experts in one tensor; CheckpointError: the source's faults.
    """
    if scheme.is_dense:
        raise UsageError(f"{scheme} is not a quantized scheme: name one such as int4_g128, fp8_block or nvfp4")
    if any(weight.stacked for weight in table.weights):
        raise UsageError(f"{source} has its experts in one tensor, which is not written quantized: quantize at load")
    try:
        target = open_writer(form, scheme)
    except FormatError as error:
        raise UsageError(str(error)) from error
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not an empty folder: name a new one")
    checkpoint = Checkpoint(source)
    config = read_json(source / "config.json")
    if config.get("quantization_config"):
        raise UsageError(f"{source} is quantized already: {config['quantization_config']}")
    shapes = {
        f"{name}.weight": (weight.rows[index % len(weight.rows)], weight.columns)
        for weight in table.weights if weight.kind == "linear"
        for index, name in enumerate(weight.part_names())
    }  # fmt: skip
    missing = [name for name in shapes if name not in checkpoint]
    if missing:
        raise CheckpointError(f"{source} has no tensor {missing[0]}")
    with _whole(out) as folder:
        writer = _Writer(folder)
        before = 0
        for done, name in enumerate(sorted(checkpoint)):
            tensor = checkpoint.read(name)
            before += tensor.numel() * tensor.element_size()
            if name in shapes:
                base = name.removesuffix(".weight")
                tensor = checkpoint.read(name, shapes[name], dtypes=FLOATS)
                try:
                    rounded = target.quantize(tensor)
                    stored = target.tensors(rounded if rounding is None else rounding(base, tensor, rounded))
                except ValueError as error:  # FormatError among them
                    raise CheckpointError(f"{name}: {error}") from error
                for field, value in stored.items():
                    writer.add(f"{base}.{field}", value)
            else:
                writer.add(name, tensor.clone())
            if progress is not None:
                progress(done + 1, len(checkpoint.entries))
        after = writer.close()
        config["quantization_config"] = target.config(_kept(checkpoint, shapes))
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for extra in sorted(source.iterdir()):
            weights = extra.suffix in WEIGHT_SUFFIXES or extra.name.endswith(".index.json")
            if extra.is_file() and not weights and extra.name != "config.json":
                shutil.copyfile(extra, folder / extra.name)
    return {"tensors": len(shapes), "bytes_before": before, "bytes_after": after}


def _kept(checkpoint: Checkpoint, quantized: Collection[str]) -> list[str]:
    """Modules whose matrices stay in floats; embeddings are no linear layers to anyone."""
    matrices = (n for n, e in checkpoint.entries.items() if n.endswith(".weight") and len(e.shape) == 2 and n not in quantized)
    return [n.removesuffix(".weight") for n in matrices if not n.endswith("embed_tokens.weight")]


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `out` in the end, or is gone when writing fails."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    except OSError as error:
        raise UsageError(f"cannot write to {out.parent}: {error.strerror or error}") from error
    try:
        yield folder
        folder.chmod(0o777 & ~_umask())  # mkdtemp's folders are their owner's alone
        try:
            folder.rename(out)
        except OSError as error:
            raise UsageError(f"{out} came to be while it was written, or cannot be made: {error.strerror or error}") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class _Writer:
    """Safetensors files of bounded size, and their index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held: dict[str, Tensor] = {}
        self.size = self.total = 0
        self.files: list[tuple[Path, list[str]]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        size = tensor.numel() * tensor.element_size()
        if self.held and self.size + size > SHARD_BYTES:
            self._flush()
        self.held[name] = tensor
        self.size += size
        self.total += size

    def close(self) -> int:
        """Write what is left, name the files and write the index; total bytes of tensors."""
        self._flush()
        count = len(self.files)
        weight_map = {}
        for number, (path, names) in enumerate(self.files, 1):
            name = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            path.rename(self.folder / name)
            weight_map.update(dict.fromkeys(names, name))
        if count > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(weight_map.items()))}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return self.total

    def _flush(self) -> None:
        path = self.folder / f"part-{len(self.files)}.safetensors"
        save_file(self.held, path, metadata={"format": "pt"})
        self.files.append((path, list(self.held)))
        self.held, self.size = {}, 0
