"""The closure of a kernel, determined by reading sources: its Python modules, and the native sources whose entries it calls.

Nothing is imported and nothing is run: the hash of a kernel can be computed without torch and without a compiler.

Python: the modules of the spec and of the launcher, and what these import, in functions too, but not under
``if TYPE_CHECKING``. The search covers `COUNTED` and, for a third-party kernel, its own package. Other modules of
`gristmill.kernel_registry` only describe kernels; they affect a launch through its problem and its configuration,
which are in the key of every record. A file that a module names in a string and that lies beside it counts with it.

Native: every string that begins with ``gm_`` in those modules names an entry; ``f"gm_linear_{config['format']}"`` names the
one of a configuration, any other placeholder matches any text. `native_sources` determines which sources define an entry.
The closure of an entry has every quoted ``#include``, the sources whose entries it calls, and the source that its library is linked with.
Instances that CMake generates are represented by their template and its table. Layouts are not in the closure: their names carry a version.

After the libraries are built, CMake writes into ``manifest.json``, per compiled source, the digest of its closure, its entries, and per code
level a digest of closure, flags and compiler. Two hashes follow:

    Kernel.code_hash(config)            of the present sources (native code in a wheel: as built); for times
    Kernel.verification_hash(config)    Python as above; native code as built, at the configuration's code level; for verifications

    >>> from gristmill.kernel_registry import default_registry
    >>> kernel = default_registry().kernel("rms_norm", "rms_norm_cpu")
    >>> kernel.code_hash() == kernel.code_hash({"level": "avx2"}), len(kernel.code_hash())
    (True, 16)

After an edit of a header, times no longer count as measured. Verifications still hold, because the old binary still runs; after the rebuild
they do not. A time that is measured between the edit and the rebuild gets the hash of the built code (``code_hash(config, built=True)``), so
it never counts for code that it did not run. `Build.key` contains none of this: with another compiler, kernels are verified again and times
stay valid.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NamedTuple

from gristmill.kernel_registry.native_sources import Compiled, built_sources, fits, sources_in

COUNTED = (
    "gristmill.kernels",
    "gristmill.quant",
    "gristmill.kernel_registry.scheme",
    "gristmill.kernel_registry.dtypes",
    "gristmill.kernel_registry.call_struct",
)
"""The modules that decide what a kernel of gristmill computes, each with everything below it."""

Read = Callable[[str], bytes | None]
Entry = tuple[str, ...]
"""The name of an entry: text and, at odd places, the name of a configuration value, or "" for any text."""


def read_file(path: str) -> bytes | None:
    """The bytes of a file; None where there is none."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


@dataclass(frozen=True)
class Module:
    """What the source of a module contains.

    Attributes:
        imports: (module as written, names imported from it; none for a plain import).
        typed: those under ``if TYPE_CHECKING``, where a package with lazy imports states the origin of its names.
        entries: native entries that it names.
        files: strings that may be the name of a file.
    """

    imports: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    typed: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    entries: tuple[Entry, ...]
    files: tuple[str, ...]


_TRIPLE = re.compile(r"(\"\"\"|''').*?\1", re.S)
_COMMENT = re.compile(r"#[^\n]*")
_TYPED = re.compile(
    r"^([ \t]*)if[ \t]+(?:\w+\.)?TYPE_CHECKING:[ \t]*\n((?:\1[ \t]+[^\n]*\n?|[ \t]*\n)+)", re.M
)
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]*(\([^)]*\)|(?:[^\n\\]|\\\n)+)|import[ \t]+((?:[^\n\\]|\\\n)+))",
    re.M,
)
_ENTRY = re.compile(r"(?<!\w)f\"(gm_[^\"\n]*)\"|(?<!\w)f'(gm_[^'\n]*)'|\"(gm_\w+)\"|'(gm_\w+)'")
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_OF_CONFIG = re.compile(r"config\[['\"](\w+)['\"]\]")
_FILE = re.compile(r"[\"']([\w-]+(?:\.[\w-]+)+)[\"']")


@cache
def read_module(source: bytes) -> Module:
    """The imports, entries and files that the text of a Python module names."""
    code = _TRIPLE.sub('""', source.decode("utf-8", "replace"))
    plain = _COMMENT.sub("", code)
    typed = [block for match in _TYPED.finditer(plain) for block in _imports(match[2])]
    entries = _ENTRY.finditer(code) if "gm_" in code else ()  # most name none, and the search is slow
    names = (next(filter(None, match.groups())) for match in entries)
    return Module(
        imports=tuple(_imports(_TYPED.sub("", plain))),
        typed=tuple(typed),
        entries=tuple(dict.fromkeys(_entry(text) for text in names)),
        files=tuple(dict.fromkeys(_FILE.findall(code))),
    )


def _imports(code: str) -> Iterator[tuple[str, tuple[tuple[str, str], ...]]]:
    for base, names, plain in _IMPORT.findall(code):
        if plain:
            yield from ((item.split()[0], ()) for item in plain.replace("\\", " ").split(",") if item.split())
            continue
        parts = (item.split() for item in names.strip("()").replace("\\", " ").split(","))
        yield base, tuple((part[0], part[-1]) for part in parts if part)


def _entry(text: str) -> Entry:
    parts = _PLACEHOLDER.split(text)
    named = (_OF_CONFIG.fullmatch(part) for part in parts[1::2])
    parts[1::2] = [match[1] if match else "" for match in named]
    return tuple(parts)


def entry_pattern(entry: Entry, config: Mapping[str, object]) -> str:
    """The name of an entry under a configuration; ``*`` for any text."""
    return "".join(
        part if not index % 2 else str(config[part]) if part in config else "*"
        for index, part in enumerate(entry)
    )


@dataclass(frozen=True)
class Reach:
    """The Python files, (name, bytes) by name, and the native entries that they name."""

    files: tuple[tuple[str, bytes], ...]
    entries: tuple[Entry, ...]


class _Step(NamedTuple):
    """One module: its files, the entries that it names, the modules that it runs."""

    files: dict[str, bytes]
    entries: tuple[Entry, ...]
    runs: tuple[str, ...]


@dataclass
class Sources:
    """The sources of this installation, each read once; ``read(path)`` returns the bytes, or None."""

    read: Read = read_file
    _texts: dict[str, bytes | None] = field(default_factory=dict, repr=False)
    _paths: dict[str, str] = field(default_factory=dict, repr=False)
    _homes: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict, repr=False)
    _steps: dict[str, _Step] = field(default_factory=dict, repr=False)
    _reach: dict[tuple[str, ...], Reach] = field(default_factory=dict, repr=False)
    _hashes: dict[tuple[object, ...], str] = field(default_factory=dict, repr=False)
    _present: tuple[Compiled, ...] | None = field(default=None, repr=False)
    _built: tuple[Compiled, ...] | None = field(default=None, repr=False)

    def present(self) -> tuple[Compiled, ...]:
        """The native sources beside the Python ones; none in a wheel."""
        if self._present is None:
            self._present = tuple(
                s for folder in _folders("gristmill") for s in sources_in(folder, self._text)
            )
        return self._present

    def built(self) -> tuple[Compiled, ...]:
        """The native sources that the libraries were built from, by their manifest."""
        if self._built is None:
            self._built = tuple(
                s for folder in _folders("gristmill") for s in built_sources(Path(folder) / "_lib")
            )
        return self._built

    def reach(self, *modules: str) -> Reach:
        """What `modules` run: they and what they import, as far as it counts."""
        if modules not in self._reach:
            scope = (*COUNTED, *({module.partition(".")[0] for module in modules} - {"gristmill", ""}))
            files: dict[str, bytes] = {}
            entries: set[Entry] = set()
            visited: set[str] = set()
            waiting = [module for module in modules if module]
            while waiting:
                name = waiting.pop()
                if name not in visited and (name in modules or _within(name, scope)):
                    visited.add(name)
                    step = self._step(name)
                    files |= step.files
                    entries.update(step.entries)
                    waiting += step.runs
            self._reach[modules] = Reach(tuple(sorted(files.items())), tuple(sorted(entries)))
        return self._reach[modules]

    def natives(
        self, reach: Reach, config: Mapping[str, object], candidates: tuple[Compiled, ...]
    ) -> list[Compiled]:
        """The sources among `candidates` that define the entries of `reach`, and those that they call."""
        patterns = [entry_pattern(entry, config) for entry in reach.entries]
        sources: dict[str, Compiled] = {}
        waiting = [s for s in candidates if any(fits(p, name) for p in patterns for name in s.entries)]
        by_name = {source.name: source for source in candidates}
        while waiting:
            source = waiting.pop()
            if source.name not in sources:
                sources[source.name] = source
                waiting += [by_name[name] for name in source.links if name in by_name]
        return [sources[name] for name in sorted(sources)]

    def code_hash(self, modules: tuple[str, ...], config: Mapping[str, object], built: bool) -> str:
        """A hash of what `modules` run: as the sources are now, or, with `built`, as they were when the libraries were
        built. In a wheel both are the same, and the same as in the checkout that it was made of."""
        return self._hash("code", modules, config, built)

    def verification_hash(self, modules: tuple[str, ...], config: Mapping[str, object]) -> str:
        """A hash of what `modules` run as it was compiled: with flags and compiler, at the code level of `config`."""
        return self._hash("verification", modules, config, True)

    def _hash(self, kind: str, modules: tuple[str, ...], config: Mapping[str, object], built: bool) -> str:
        reach = self.reach(*modules)
        level = str(config.get("level", ""))
        names = tuple(entry_pattern(entry, config) for entry in reach.entries)
        key = (kind, modules, names, level if kind == "verification" else "", built)
        if key not in self._hashes:
            lookups = (self.built, self.present) if built else (self.present, self.built)
            natives = next(
                (
                    sources
                    for compiled_sources in lookups
                    if names and (sources := self.natives(reach, config, compiled_sources()))
                ),
                [],
            )
            lines = [f"{_sha(data)} {name}" for name, data in reach.files]
            lines += sorted({s.digest(level) if kind == "verification" else s.closure for s in natives})
            self._hashes[key] = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        return self._hashes[key]

    def _step(self, name: str) -> _Step:
        """What a module is, and which modules it runs: its packages, and what it imports of its own package and of ours."""
        if name not in self._steps:
            self._steps[name] = self._read_step(name)
        return self._steps[name]

    def _read_step(self, name: str) -> _Step:
        runs = [name.rpartition(".")[0]]
        path = self._path(name)
        text = self._text(path) if path else None
        if text is None:
            return _Step({}, (), tuple(runs))
        module, own = read_module(text), _name(name, path)
        files = {own: text}
        for beside in module.files:
            data = self._text(os.path.join(os.path.dirname(path), beside))
            if data is not None:
                files[os.path.join(os.path.dirname(own), beside)] = data
        package = name if path.endswith("__init__.py") else runs[0]
        for base, names in module.imports:
            base = _absolute(base, package)
            if base.partition(".")[0] in ("gristmill", name.partition(".")[0]):
                runs += self._imported_modules(base, names)
        return _Step(files, module.entries, tuple(dict.fromkeys(runs)))

    def _text(self, path: str) -> bytes | None:
        if path not in self._texts:
            self._texts[path] = self.read(path)
        return self._texts[path]

    def _path(self, module: str) -> str:
        """Where the source of a module is; "" for one that has none."""
        if module not in self._paths:
            self._paths[module] = self._find(module)
        return self._paths[module]

    def _find(self, module: str) -> str:
        top, *rest = module.split(".")
        for folder in _folders(top):
            stem = os.path.join(folder, *rest)
            for path in (os.path.join(stem, "__init__.py"), stem + ".py"):
                if self._text(path) is not None:
                    return path
        return "" if rest else _single(top)

    def _imported_modules(self, base: str, names: tuple[tuple[str, str], ...]) -> list[str]:
        """The modules that an import statement runs. A package imported whole may be used for any of its lazy names."""
        if names and names[0][0] != "*":
            return [module for name, _ in names for module in self._owner(base, name)]
        lazy = self._lazy_names(base) if _within(base, COUNTED) else {}
        return [base, *(module for name in lazy for module in self._owner(base, name))]

    def _owner(self, base: str, name: str) -> list[str]:
        """The module that ``from base import name`` runs, and through which packages it goes."""
        if self._path(f"{base}.{name}"):
            return self._imported_modules(f"{base}.{name}", ())
        home = self._lazy_names(base).get(name)
        return [base, *(self._owner(*home) if home else ())]

    def _lazy_names(self, package: str) -> dict[str, tuple[str, str]]:
        """Lazy names of a package, and their origin: what it imports under ``if TYPE_CHECKING``."""
        if package not in self._homes:
            self._homes[package] = self._read_lazy_names(package)
        return self._homes[package]

    def _read_lazy_names(self, package: str) -> dict[str, tuple[str, str]]:
        path = self._path(package)
        text = self._text(path) if path.endswith("__init__.py") else None
        homes = {
            bound: (_absolute(base, package), name)
            for base, names in (read_module(text).typed if text is not None else ())
            for name, bound in names
        }
        top = package.partition(".")[0]
        return {bound: home for bound, home in homes.items() if home[0].partition(".")[0] == top}


@cache
def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@cache
def _folders(top: str) -> tuple[str, ...]:
    """The folders of a top-level package; found, not imported."""
    spec = _spec(top)
    return tuple(spec.submodule_search_locations or ()) if spec else ()


@cache
def _single(top: str) -> str:
    """The file of a top-level module that is no package."""
    spec = _spec(top)
    return spec.origin if spec and spec.origin and spec.origin.endswith(".py") else ""


def _spec(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except ValueError:  # __main__, and modules made by hand
        return None


def _within(name: str, scope: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in scope)


def _absolute(base: str, package: str) -> str:
    """The module that ``base`` names in `package`: one leading dot is the package itself, each further one a package up."""
    name = base.lstrip(".")
    up = len(base) - len(name)
    if not up:
        return base
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - up + 1], *([name] if name else ())])


def _name(module: str, path: str) -> str:
    """A file's name within gristmill (``kernels/common.py``), or with its package before it."""
    parts = module.split(".")
    parts = parts[1:] if parts[0] == "gristmill" else parts
    return "/".join([*parts, "__init__.py"]) if path.endswith("__init__.py") else "/".join(parts) + ".py"


@cache
def installed_sources() -> Sources:
    """The sources of this installation, as they were at the first call."""
    return Sources()
