"""A folder that is written layer by layer. Complete layers survive an interruption, and an interrupted run resumes after them."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors.torch import load_file, save_file
from torch import Tensor

from gristmill.quant.checkpoints.files import read_json
from gristmill.quant.checkpoints.safetensors import read_header
from gristmill.quant.errors import UsageError

RUN, LOCK, NOTES = "run.json", "lock", "notes.json"


class Unfinished:
    """`.NAME.unfinished` next to `out`, renamed to `out` at the end.

    Parts are safetensors files that are written atomically; an interrupted run leaves them. As a context manager: a `UsageError` (invalid
    arguments or an invalid source, which would fail again) removes the folder; any other exit keeps it.

    Args:
        identity: the options that the parts depend on; a folder with others is refused, naming the options.

    Raises:
        UsageError: the folder cannot be made, is in use by another process, or was begun with other options.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any]) -> None:
        self.out = out
        self.folder = out.parent / f".{out.name}.unfinished"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise UsageError(f"cannot write to {out.parent}: {error.strerror or error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._check(json.loads(json.dumps(dict(identity))))
        except BlockingIOError:
            os.close(self._lock)
            raise UsageError(f"{out} is being written by another process") from None
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if isinstance(error, UsageError):
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def read(self, part: str) -> dict[str, Tensor] | None:
        """The tensors of a part; None if it is not written yet."""
        path = self._path(part)
        if not path.exists():
            return None
        read_header(path)  # names the file if a full disk truncated it
        return load_file(path)

    def write(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a part atomically."""
        path = self._path(part)
        temporary = path.with_suffix(".writing")
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            temporary,
            metadata={"format": "pt"},
        )
        os.replace(temporary, path)

    def notes(self, new: Sequence[str] = ()) -> list[str]:
        """The notes of this and earlier runs, including `new`, without duplicates."""
        path = self.folder / NOTES
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        notes = list(dict.fromkeys([*known, *new]))
        if notes != known:
            _replace(path, json.dumps(notes, indent=1))
        return notes

    def parts(self) -> list[Path]:
        """The files of all parts, by name."""
        return sorted(self.folder.glob("part-*.safetensors"))

    def finish(self) -> None:
        """Rename the folder to `out`; UsageError if `out` exists by now."""
        for name in (RUN, LOCK, NOTES):
            (self.folder / name).unlink(missing_ok=True)
        for stale in self.folder.glob("*.writing"):
            stale.unlink()
        try:
            self.folder.rename(self.out)
        except OSError as error:
            raise UsageError(
                f"{self.out} came to be while it was written, or cannot be made: {error.strerror or error}"
            ) from error

    def _path(self, part: str) -> Path:
        return self.folder / f"part-{part}.safetensors"

    def _check(self, identity: dict[str, Any]) -> None:
        path = self.folder / RUN
        if not path.exists():
            _replace(path, json.dumps(identity, indent=1))
            return
        before = read_json(path)
        other = [
            f"{name} {before.get(name)}, not {identity.get(name)}"
            for name in sorted(before.keys() | identity.keys())
            if before.get(name) != identity.get(name)
        ]
        if other:
            raise UsageError(
                f"{self.folder} was begun with {'; '.join(other)}: run with the same options to resume, or delete that folder"
            )


def _replace(path: Path, text: str) -> None:
    """Write a file atomically."""
    temporary = path.with_suffix(".writing")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
