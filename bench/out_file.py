"""Files that a command writes when it is done: whether that will be possible is found out before it measures for an hour."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import click

from gristmill.kernel_registry.store import Store


class OutFile(click.Path):
    """A file to be written, in a folder that may still have to be made: a Path, refused where nothing can be written there."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path; UsageError (a mistaken option) if the file could not be written."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if why := unwritable(path):
            self.fail(why, param, ctx)
        return path


def unwritable(path: Path) -> str:
    """Why a file cannot be written at `path`; "" if it can. Tried, since permissions do not tell of a file system that is only read."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"{path} cannot be written: {folder}: {error.strerror}"


def store_to_write(path: Path) -> Store:
    """What the store at `path` holds; UsageError if nothing could be added to it, StoreError if it is damaged."""
    if why := unwritable(path):
        raise click.UsageError(f"the store {why}")
    return Store.read(path)
