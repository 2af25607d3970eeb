"""Records in memory that the processes of a host share: files of a folder that is never written to a disk."""

from __future__ import annotations

import os
import re
from pathlib import Path

from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_transfer import StoreSpec
from gristmill.runtime.kv_transfer.file import FileStore, folder_and_capacity

FOLDER = Path("/dev/shm")


def open_store(argument: str) -> FileStore:
    """From ``NAME:SIZE``. The memory is there until the folder ``/dev/shm/gristmill-NAME`` is removed, or the host restarts: what one
    process has saved, others find after its end.

    Anyone may make folders there, so one that others own or may write is refused: they could forge records.

    Raises:
        UsageError: no name of letters, digits, ``_`` and ``-``, no size, or no such memory on this host.
    """
    where = "the store 'shm:NAME:SIZE'"
    name, capacity = folder_and_capacity(argument, where)
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or capacity is None:
        raise UsageError(
            f"{where}: expected a name of letters, digits, _ and -, and a size, such as shm:pool:4GiB, got {argument!r}"
        )
    return FileStore(private_folder(name, where), capacity)


def private_folder(name: str, where: str) -> Path:
    """The folder of a name in shared memory, which is made if it is missing. UsageError, with `where`: it is not this user's alone."""
    if not FOLDER.is_dir():
        raise UsageError(f"{where}: this host has no {FOLDER}")
    folder = FOLDER / f"gristmill-{name}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise UsageError(f"{where}: {folder} cannot be used: {error}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise UsageError(
            f"{where}: {folder} belongs to another user, or others may write there; take another name"
        )
    return folder


STORE = StoreSpec(
    name="shm", summary="shm:NAME:SIZE, memory that the processes of this host share", open=open_store
)
