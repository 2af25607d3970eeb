"""Policy: the user's constraints on selection. One file, named by GRISTMILL_POLICY or passed; there are no other switches."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.grades import GRADES

if TYPE_CHECKING:
    from gristmill.kernel_registry.registry import Registry

POLICY_VARIABLE = "GRISTMILL_POLICY"


class PolicyError(ValueError):
    """A policy that is unreadable, or that no kernel can satisfy."""


def default_cache() -> Path:
    """Where the store and compiled kernels live unless a policy says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gristmill"


@dataclass(frozen=True)
class Policy:
    """The constraints on selection. PolicyError for an entry of another type or value.

    Attributes:
        pins: operation name or ``*`` -> kernel name patterns, tried in order before any other kernel.
        exclude: kernel name patterns that never run.
        strict: an operation whose pinned kernels cannot serve a problem is an error, never a fallback.
        deterministic, batch_invariant: only kernels that declare it. Under batch_invariant the kernel of highest priority runs every
            size, with its default configuration: which one is fastest depends on the size, and the order of additions on the kernel.
        weight_memory: how much memory packed weights may take, as a multiple of the QuantTensor's bytes (for one packing, of those with its
            rows rounded up to 16); infinite: as much as makes it fastest.
        activations: ``int8``: on CPUs, the runtime multiplies weight-only integer and 4-bit float weights with activations quantized to
            int8 (QuantScheme.with_int8_activation); this changes results. ``float``: all weights are multiplied with activations in their
            own dtype. None: in the format that the checkpoint declares, where a kernel of the device multiplies it, else in their own.
        grades: grades of proof by which a kernel runs (`kernel_registry.grades`). With the default, ``here``, the first use verifies it on
            this device; with ``elsewhere`` too, a kernel that was verified on another device of the same kind runs without that.
        canary: a kernel that the very code of this installation was verified with on another device of the same model, by a record that comes
            with gristmill, runs once one problem for each configuration is verified here. False = every problem is verified here.
        cpu_level: highest CPU code level to use (``avx2``, ``avx512`` ...); None = the best this machine runs.
        store, cache: paths; None = under the user's cache folder. With a `cache`, Triton keeps the code that it compiles for a GPU below it
            too, unless TRITON_CACHE_DIR names another folder.
    """

    pins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    strict: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    weight_memory: float = 1.05
    activations: str | None = None
    grades: tuple[str, ...] = ("here",)
    canary: bool = True
    cpu_level: str | None = None
    store: str | None = None
    cache: str | None = None
    origin: str = "default"

    def __post_init__(self) -> None:
        """Lists as tuples, and one text as a tuple of it: iterated, a text would be patterns of one letter."""
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name != "origin" and not (value is None and entry.default is None):
                object.__setattr__(self, entry.name, _checked(entry.name, value, self.origin))

    def pinned(self, op: str) -> tuple[str, ...]:
        """The kernel patterns pinned for `op`: its own, else those for ``*``."""
        return self.pins.get(op, self.pins.get("*", ()))

    def rank(self, op: str, kernel: str) -> int | None:
        """Place of `kernel` among the pins of `op`, None when it is not pinned."""
        for place, pattern in enumerate(self.pinned(op)):
            if fnmatchcase(kernel, pattern):
                return place
        return None

    def excludes(self, kernel: str) -> str | None:
        """The exclusion pattern that matches `kernel`, if any."""
        return next((pattern for pattern in self.exclude if fnmatchcase(kernel, pattern)), None)

    def unmatched(self, registry: Registry) -> list[str]:
        """A sentence for each pin and exclusion that no operation or kernel of `registry` has the name of: it is most likely misspelt."""
        if not self.pins and not self.exclude:
            return []
        kernels = {op: [kernel.name for kernel in registry.kernels_of(op)] for op in registry.ops}
        kernels["*"] = [name for names in kernels.values() for name in names]
        missing = []
        for op, patterns in self.pins.items():
            if op not in kernels:
                missing.append(f"pins: no operation {_called(op, kernels)}")
                continue
            of = "" if op == "*" else f" of {op}"
            missing += [f"pins: no kernel{of} {told}" for told in _unmatched(patterns, kernels[op])]
        missing += [f"exclude: no kernel {told}" for told in _unmatched(self.exclude, kernels["*"])]
        return [f"policy {self.origin}: {told}" for told in missing]

    @property
    def store_path(self) -> Path:
        """The file that holds verification records and measured times."""
        return Path(self.store) if self.store else self.cache_path / "store.json"

    @property
    def cache_path(self) -> Path:
        """The folder of everything that can be deleted and recreated."""
        return Path(self.cache) if self.cache else default_cache()

    @staticmethod
    def parse(data: Mapping[str, Any], origin: str) -> Policy:
        """A policy from a table; PolicyError names the invalid entry."""
        known = {f.name: f for f in fields(Policy) if f.name != "origin"}
        unknown = sorted(data.keys() - known.keys())
        if unknown:
            raise PolicyError(
                f"{origin}: unknown policy entry {unknown[0]!r}; entries are {', '.join(known)}"
            )
        for name, value in data.items():
            _checked(name, value, origin)  # also None, which no entry of a file is
        return Policy(**data, origin=origin)

    @staticmethod
    def load(path: str | Path) -> Policy:
        """The policy in a TOML or JSON file; PolicyError says what is wrong with it."""
        import tomllib

        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise PolicyError(f"policy {path}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise PolicyError(f"policy {path}: not UTF-8 text: {error}") from error
        try:
            data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except ValueError as error:
            raise PolicyError(f"policy {path}: {error}") from error
        if not isinstance(data, dict):
            raise PolicyError(f"policy {path}: expected a table, got {type(data).__name__}")
        return Policy.parse(data, str(path))

    @staticmethod
    def current() -> Policy:
        """The policy that GRISTMILL_POLICY names, or the default one. Read once per value of the variable."""
        return _current(os.environ.get(POLICY_VARIABLE, ""))


def _unmatched(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    return [_called(p, names) for p in patterns if not any(fnmatchcase(name, p) for name in names)]


def _called(name: str, known: Iterable[str]) -> str:
    near = [] if set(name) & set("*?[") else get_close_matches(name, known, n=1)
    return f"is called {name!r}" + (f"; did you mean {near[0]}?" if near else "")


@cache
def _current(path: str) -> Policy:
    return Policy.load(path) if path else Policy()


def _checked(name: str, value: Any, origin: str) -> Any:
    def wrong(expected: str) -> PolicyError:
        return PolicyError(f"{origin}: {name} wants {expected}, got {value!r}")

    def texts(entry: Any) -> tuple[str, ...]:
        if isinstance(entry, str):
            return (entry,)
        if isinstance(entry, list | tuple) and all(isinstance(item, str) for item in entry):
            return tuple(entry)
        raise wrong("text or a list of texts")

    if name == "pins":
        if not isinstance(value, Mapping):
            raise wrong("a table of operation -> kernel patterns")
        return {op: texts(patterns) for op, patterns in value.items()}
    if name == "exclude":
        return texts(value)
    if name == "grades":
        named = texts(value)
        if not named or any(grade not in GRADES for grade in named):
            raise wrong(f"one or more of {', '.join(GRADES)}")
        return named
    if name in ("strict", "deterministic", "batch_invariant", "canary"):
        if not isinstance(value, bool):
            raise wrong("true or false")
        return value
    if name == "weight_memory":
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1.0:
            raise wrong("a number of at least 1")
        return float(value)
    if name in ("store", "cache") and isinstance(value, os.PathLike):
        return os.fspath(value)
    if not isinstance(value, str):
        raise wrong("text")
    if name == "activations" and value not in ("int8", "float"):
        raise wrong("int8 or float")
    return value
