"""Checkpoints that gristmill quantized: a Hugging Face directory whose linear weights are QuantTensor fields.

In place of ``NAME.weight`` stand ``NAME.codes`` (uint8 [N, ceil(K*bits/8)], a dense little-endian bit stream along K),
and, where the scheme has them, ``NAME.scales``, ``NAME.zero`` and ``NAME.global_scale``, as `gristmill.quant.tensor` describes
them; E8M0 scales are U8, E4M3 scales F8_E4M3. Every other tensor is as it was, and config.json gains

    "quantization_config": {"quant_method": "gristmill", "version": 1, "scheme": "int4_g128"}
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file
from torch import Tensor

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import QuantTensor
from gristmill.runtime.errors import CheckpointError, UsageError
from gristmill.runtime.loader.checkpoint import INDEX, SINGLE, Checkpoint
from gristmill.runtime.loader.config import read_json

if TYPE_CHECKING:
    from gristmill.runtime.loader.weights import WeightTable

FIELDS = ("codes", "scales", "zero", "global_scale")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Files of a source that are not copied: its weights, in any format."""
SHARD_BYTES = 2 << 30
"""Bytes after which a new file is begun: what writing holds in memory at most."""


def read_quantized(
    checkpoint: Checkpoint, name: str, shape: tuple[int, int], scheme: QuantScheme
) -> tuple[QuantTensor, list[str]]:
    """The weight `name` [N, K] of a checkpoint that gristmill quantized, and the tensors it is made of.

    Raises:
        CheckpointError: a field is missing, or does not have the shape or dtype of the scheme.
    """
    names = [f"{name}.{field}" for field in FIELDS if f"{name}.{field}" in checkpoint]
    if f"{name}.codes" not in names:
        raise CheckpointError(f"{checkpoint.directory} says {scheme}, but has no tensor {name}.codes")
    tensors = {full.rpartition(".")[2]: checkpoint.read(full).clone() for full in names}
    try:
        found = QuantTensor(
            tensors["codes"], tensors.get("scales"), shape, scheme, tensors.get("zero"), tensors.get("global_scale")
        )
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{checkpoint.directory}: {name}: {error}") from error
    return found, names


def write_quantized(
    source: Path,
    out: Path,
    table: WeightTable,
    scheme: QuantScheme,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, int]:
    """Quantize the linear weights of a model directory to nearest and write it, one tensor at a time, to `out`.

    `out` appears whole or not at all: everything is written to a hidden folder beside it, which then takes its name.
    progress: called with (tensors done, tensors in all). Returns {"tensors": quantized ones, "bytes_before", "bytes_after"}.

    Raises:
        UsageError: `out` exists and is not empty, or cannot be written, or the scheme is dense; CheckpointError: the
            source's faults.
    """
    from gristmill.runtime.loader.weights import quantize_part

    if scheme.is_dense:
        raise UsageError(f"{scheme} is not a quantized scheme: name one such as int4_g128, fp8_block or nvfp4")
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
                tensor = checkpoint.read(name, shapes[name], floating=True)  # type: ignore[arg-type]
                for field, value in quantize_part(base, tensor, scheme).tensors().items():
                    writer.add(f"{base}.{field}", value)
            else:
                writer.add(name, tensor.clone())
            if progress is not None:
                progress(done + 1, len(checkpoint.entries))
        after = writer.close()
        config["quantization_config"] = {"quant_method": "gristmill", "version": 1, "scheme": str(scheme)}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for extra in sorted(source.iterdir()):
            weights = extra.suffix in WEIGHT_SUFFIXES or extra.name.endswith(".index.json")
            if extra.is_file() and not weights and extra.name != "config.json":
                shutil.copyfile(extra, folder / extra.name)
    return {"tensors": len(shapes), "bytes_before": before, "bytes_after": after}


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
