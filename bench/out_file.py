"""Output files of commands, checked for write access before the measurements start."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import click

from gristmill.kernel_registry.store import Store


class OutFile(click.Path):
    """An output file, whose folder may not exist yet, as a Path. Refused if it cannot be written."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path; UsageError if the file cannot be written."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if why := unwritable(path):
            self.fail(why, param, ctx)
        return path


def unwritable(path: Path) -> str:
    """Why a file cannot be written at `path`; "" if it can. Tried by writing, because permissions do not show read-only file systems."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"{path} cannot be written: {folder}: {error.strerror}"


def store_to_write(path: Path) -> Store:
    """The content of the store at `path`; UsageError if it cannot be written, StoreError if it is damaged."""
    if why := unwritable(path):
        raise click.UsageError(f"the store {why}")
    return Store.read(path)
