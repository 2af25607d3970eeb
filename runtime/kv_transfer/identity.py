"""Keys of blocks that hold between processes: what a block's bytes depend on, and the tokens up to its end.

The chain of hashes over blocks is that of the prefix cache, with SHA-256 in place of Python's hash, which differs between processes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path

from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.models import Model
from gristmill.runtime.parallel.rank_processes import RanksConfig

WHOLE, SAMPLE, EVERY = 64 << 20, 4 << 10, 8 << 20
"""Weight files up to `WHOLE` bytes are hashed whole, of larger ones `SAMPLE` bytes in `EVERY`."""
SUFFIXES = (".safetensors", ".gguf", ".json")


def identity_of_files(path: Path) -> str:
    """What distinguishes the weights at a path from others: a hash of the names, sizes and bytes of the files, of large files samples.

    Raises:
        UsageError: there are no weight files.
    """
    files = [path] if path.is_file() else sorted(f for f in path.glob("*") if f.suffix in SUFFIXES)
    if not any(file.suffix != ".json" for file in files):
        raise UsageError(
            f"{path} has no weight files that would identify the model for kv_transfer: give KVTransfer(identity=...)"
        )
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size};".encode())
        with open(file, "rb") as data:
            if size <= WHOLE:
                digest.update(data.read())
                continue
            for place in range(0, size, EVERY):
                data.seek(place)
                digest.update(data.read(SAMPLE))
            data.seek(max(0, size - SAMPLE))
            digest.update(data.read())
    return digest.hexdigest()


def root_key(identity: str, model: Model, cache: PagedCache) -> bytes:
    """The key before the first block. `identity` names the weights, with the schemes they are quantized to at load.

    Two engines with the same root have blocks of the same bytes, as far as their kernels round alike.
    """
    plans, config = model.plans, model.config
    parts = (
        identity,
        str(plans.dtype),
        cache.form.name,
        cache.block_size,
        cache.windows,
        [[tuple(tensor.shape[1:]) for tensor in layer] for layer in cache.layers],
        config.num_layers,
        config.mla is not None,
    )
    return hashlib.sha256(repr(parts).encode()).digest()


def root_of_ranks(identity: str, ranks: RanksConfig, nbytes: int) -> bytes:
    """As `root_key`, for a model over ranks: also the number of ranks, and what each of them has. `nbytes` is of a block on all of them."""
    loading = {name: str(value) for name, value in ranks.loading.items() if name != "path"}
    parts = (identity, ranks.world, ranks.context_parallel, sorted(loading.items()), nbytes)
    return hashlib.sha256(repr(parts).encode()).digest()


def extend_keys(keys: list[bytes], root: bytes, tokens: Sequence[int], block_size: int) -> None:
    """Append the keys of the full blocks of `tokens` that `keys` does not have yet."""
    key = keys[-1] if keys else root
    pack = struct.Struct(f"<{block_size}q").pack
    for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        key = hashlib.sha256(key + pack(*tokens[start : start + block_size])).digest()
        keys.append(key)


def group_key(key: bytes, group: int) -> bytes:
    """The key of a block in one of several groups (`kv_cache.groups`)."""
    return hashlib.sha256(key + bytes([group])).digest() if group else key
