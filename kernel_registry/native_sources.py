"""Native sources: the entries that each one defines, its includes and calls, and how it was compiled.

`sources_in` reads them from a checkout; `built_sources` reads what CMake recorded in ``_lib/manifest.json`` when it built the
libraries (cmake/digests.cmake); a wheel has nothing else. Both digest a closure alike: the source and every
quoted ``#include`` that it reaches, each as the line ``<sha256 of the file> <its name>``, by name.

A source ``_<name>_sm<arch>.cu.in`` is a template: CMake writes one instance for each row of the table that its comment
``// gm-table: <file>`` names. Hashes cover the template and the table instead of the instances; ``@...@`` in the name of its entry
matches any text.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from gristmill.kernel_registry.build import read_manifest

LIBRARIES = {
    ".cpp": "kernels/_native/threads.cpp",
    ".cu": "kernels/_native/cuda_driver.cpp",
    ".hip": "kernels/_native/hip_driver.cpp",
}
"""The source that all sources of a library are linked with: threads for C++, the driver for CUDA and for HIP."""
SOURCE_FOLDERS = ("kernels", "quant")
INCLUDE_FOLDERS = ("kernels/_native", "kernels")
"""Where a quoted include is searched for after the folder of the file that has it."""


@dataclass(frozen=True)
class Compiled:
    """One compiled source.

    Attributes:
        entries: names of the functions that it defines, without code level.
        links: names of the sources whose functions it calls.
        closure: the digest of its text and of its includes.
        files: their names, as far as they exist here.
        builds: code level or architecture -> digest of closure, flags and compiler; empty for a source that was read, not built.
    """

    name: str
    entries: tuple[str, ...]
    links: tuple[str, ...]
    closure: str
    files: tuple[str, ...] = ()
    builds: Mapping[str, str] = field(default_factory=dict)

    def digest(self, level: str) -> str:
        """The digest of its code at `level`; of all its levels if it was not built at that one."""
        return (
            self.builds.get(level)
            or " ".join(self.builds[name] for name in sorted(self.builds))
            or self.closure
        )


def fits(pattern: str, name: str) -> bool:
    """Whether two names of an entry can be the same; ``*`` in either is any text."""
    return (
        pattern == name
        or _regex(pattern).fullmatch(name.replace("*", "x")) is not None
        or ("*" in name and _regex(name).fullmatch(pattern.replace("*", "x")) is not None)
    )


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(r"\w+".join(re.escape(part) for part in pattern.split("*")))


@dataclass(frozen=True)
class _Text:
    """Contents of a native file.

    Attributes:
        entries: the entries that the macros in `_ENTRIES` declare.
        names: every ``gm_`` name outside comments.
    """

    includes: tuple[str, ...]
    table: str
    entries: tuple[str, ...]
    defined: str
    names: frozenset[str]


_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.M)
_TABLE = re.compile(r"^// gm-table: (\S+)", re.M)
_ENTRIES = re.compile(
    r"GM_(?<=\bGM_)(?:KERNEL|CPU_CALL|CPU_ARGS|CUDA_ENTRY|CUDA_CALL|CUDA_ARGS|HIP_ENTRY|HIP_ARGS)\(\s*(gm_\w+|GM_ENTRY)\b"
)
_DEFINED = re.compile(r"^#define GM_ENTRY ([\w@]+)", re.M)
_PLACE = re.compile(r"@\w+@")
_NAME = re.compile(
    r"gm_(?<=\bgm_)\w+"
)  # begins with letters, which are found ten times as fast as a boundary is


@cache
def _read(source: bytes) -> _Text:
    text = source.decode("utf-8", "replace")
    code = re.sub(r"//[^\n]*", "", text)
    defined, table = _DEFINED.search(code), _TABLE.search(text)
    return _Text(
        includes=tuple(_INCLUDE.findall(code)),
        table=table[1] if table else "",
        entries=tuple(_ENTRIES.findall(code)),
        defined=_PLACE.sub("*", defined[1]) if defined else "",
        names=frozenset(_NAME.findall(code)),
    )


def sources_in(folder: str, read: Callable[[str], bytes | None]) -> tuple[Compiled, ...]:
    """The native sources of a package folder, as `read` gives them."""
    known: dict[str, _File] = {}
    closures = {name: _closure(folder, name, read, known) for name in _compiled(folder)}
    entries_of: dict[str, tuple[str, ...]] = {}
    for name, files in closures.items():
        texts = [_read(data) for _, data in files if data is not None]
        entries = {entry for text in texts for entry in text.entries}
        defined = {text.defined for text in texts if text.defined} if "GM_ENTRY" in entries else set()
        entries_of[name] = tuple(sorted(entries - {"GM_ENTRY"} | defined))
    makers = {entry: name for name, entries in entries_of.items() for entry in entries}
    sources = []
    for name, files in closures.items():
        named = frozenset().union(*(_read(data).names for _, data in files if data is not None))
        links = {makers[entry] for entry in named & makers.keys()} | {_library(name)}
        sources.append(
            Compiled(
                name=name,
                entries=entries_of[name],
                links=tuple(sorted(links - {name})),
                closure=_digest(files),
                files=tuple(file for file, data in files if data is not None),
            )
        )
    return tuple(sources)


def built_sources(folder: Path) -> tuple[Compiled, ...]:
    """The native sources that the libraries in `folder` were built from. Empty if nothing was built, or if the manifest
    has no sources."""
    recorded: Mapping[str, Any] = read_manifest(folder).get("sources", {})
    return tuple(
        Compiled(
            name=name,
            entries=tuple(record["entries"]),
            links=tuple(record["links"]),
            closure=record["closure"],
            builds=record["builds"],
        )
        for name, record in sorted(recorded.items())
    )


def _compiled(folder: str) -> Iterator[str]:
    """Names of the sources that CMake compiles: the files that cpu.cmake, cuda.cmake, cuda_ptx.cmake and hip.cmake search for."""
    for top in SOURCE_FOLDERS:
        for path, folders, files in os.walk(os.path.join(folder, top)):
            folders[:] = sorted(child for child in folders if child != "__pycache__")
            for file in sorted(files):
                name = f"{os.path.relpath(path, folder)}/{file}"
                if name in LIBRARIES.values() or re.fullmatch(
                    r"_.*(_cpu\.cpp|_sm\d+[af]?\.cu|_sm\d+\.cu\.in|\.hip)", file
                ):
                    yield name


def _library(name: str) -> str:
    """The source that the library of `name` is linked with; `name` itself for one of those."""
    if name in LIBRARIES.values():
        return name
    return next((own for suffix, own in LIBRARIES.items() if name.endswith(suffix)), LIBRARIES[".cu"])


class _File(NamedTuple):
    """The bytes of a native file, and the names of what it includes in quotes; None for one that does not exist."""

    data: bytes | None
    includes: tuple[str, ...]


def _closure(
    folder: str, name: str, read: Callable[[str], bytes | None], known: dict[str, _File]
) -> tuple[tuple[str, bytes | None], ...]:
    """(name, bytes) of a source and of everything that it includes in quotes; None for an include that does not exist.

    `known` has the files that other sources include, and gets those of this one.
    """
    contents: dict[str, bytes | None] = {}
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current in contents:
            continue
        if current not in known:
            known[current] = _file(folder, current, read)
        contents[current] = known[current].data
        waiting += known[current].includes
    return tuple(sorted(contents.items()))


def _file(folder: str, name: str, read: Callable[[str], bytes | None]) -> _File:
    data = read(os.path.join(folder, name))
    if data is None:
        return _File(None, ())
    text, parent, found = _read(data), os.path.dirname(name), []
    if text.table and name.endswith(".in"):
        found.append(os.path.normpath(os.path.join(parent, text.table)))
    for include in text.includes:
        places = [os.path.normpath(os.path.join(place, include)) for place in (parent, *INCLUDE_FOLDERS)]
        existing = (place for place in places if read(os.path.join(folder, place)) is not None)
        found.append(next(existing, include))
    return _File(data, tuple(found))


def _digest(files: tuple[tuple[str, bytes | None], ...]) -> str:
    lines = (f"{'missing' if data is None else _sha(data)} {name}\n" for name, data in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


@cache
def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
