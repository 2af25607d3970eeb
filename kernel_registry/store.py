"""Reading the store: verification records and measured times, as JSON. `gristmill.autotune.store` writes it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import AxisError, Problem
from gristmill.kernel_registry.target import Target

SCHEMA = 1
SHIPPED = Path(__file__).parent.parent / "autotune" / "tuned"
"""Stores that come with gristmill: measured times and tuned configurations by device."""
NEAR_LIMIT = 1.0
"""Largest `distance`, in powers of two, between a measured problem and one that its time is used for."""


class StoreError(ValueError):
    """A store file that cannot be read; the message names the file and the place."""


def config_key(config: Config) -> str:
    """A configuration as one canonical text."""
    return ",".join([f"{name}={config[name]}" for name in sorted(config)])


def config_of(key: str) -> dict[str, str]:
    """The values of a configuration, as text, from its `config_key`."""
    return dict(part.split("=", 1) for part in key.split(",") if part)


def target_key(target: Target) -> str:
    """The device a record belongs to: its target and its product name."""
    return f"{target.name}|{target.device}" if target.device else target.name


@dataclass(frozen=True)
class Verification:
    """Whether one kernel at one configuration matched the reference on one device with one toolchain."""

    op: str
    kernel: str
    code: str
    config: str
    problem: str
    target: str
    toolchain: str
    ok: bool
    error: float | None = None
    reason: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        return (self.op, self.kernel, self.code, self.config, self.problem, self.target, self.toolchain)


@dataclass(frozen=True)
class Timing:
    """A measured time, with the raw samples it comes from (microseconds) and how they were taken.

    `origin` says why it counts for `toolchain` although it was measured with another one; "" if it was measured with it.
    """

    op: str
    kernel: str
    code: str
    config: Mapping[str, Any]
    problem: str
    target: str
    toolchain: str
    us: float
    samples: tuple[float, ...] = ()
    timing: str = "eager,cold"
    origin: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        config = config_key(self.config)
        return (self.op, self.kernel, config, self.problem, self.target, self.toolchain, self.timing)


Timed = tuple[Problem, list[Timing]]
"""A measured problem and its times."""


@dataclass
class Store:
    """Records in memory. Pure data: looking up reads no file.

    Attributes:
        changes: how many records of an operation were added.
    """

    verifications: dict[tuple[str, ...], Verification] = field(default_factory=dict)
    _timings: dict[tuple[str, ...], Timing] = field(default_factory=dict, repr=False)
    _by_place: dict[tuple[str, str], dict[tuple[str, ...], Timing]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _alike: dict[tuple[str, str], dict[tuple[Any, ...], list[Timed]]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _problems: dict[tuple[str, str], Problem | None] = field(default_factory=dict, repr=False, compare=False)
    changes: Counter[str] = field(default_factory=Counter, repr=False, compare=False)

    def add(self, record: Verification | Timing) -> None:
        """Add a record; a later one replaces an earlier one of the same key."""
        self.changes[record.op] += 1
        if isinstance(record, Verification):
            self.verifications[record.key] = record
            return
        self._timings[record.key] = record
        self._by_place.setdefault((record.op, record.target), {})[record.key] = record
        self._alike.pop((record.op, record.target), None)

    def copy(self) -> Store:
        """A store of the same records, to which others can be added."""
        by_place = {place: dict(timings) for place, timings in self._by_place.items()}
        return Store(dict(self.verifications), dict(self._timings), by_place)

    @property
    def timings(self) -> list[Timing]:
        """Every measured time."""
        return list(self._timings.values())

    def times(self, op: str, target: str) -> Iterable[Timing]:
        """Every measured time of `op` on the device `target` (a `target_key`)."""
        return self._by_place.get((op, target), {}).values()

    def siblings(self, op: str, target: Target) -> list[str]:
        """Other devices of the same target name that `op` was measured on, as `target_key`s."""
        own = target_key(target)
        return [
            place
            for name, place in self._by_place
            if name == op and place != own and place.partition("|")[0] == target.name
        ]

    def alike(self, op: Op, target: str, problem: Problem) -> Iterable[Timed]:
        """The measured problems of `op` on the device `target` (a `target_key`) that differ from `problem` in sizes alone."""
        index = self._alike.get((op.name, target))
        if index is None:
            by_problem: dict[str, list[Timing]] = {}
            for timing in self.times(op.name, target):
                by_problem.setdefault(timing.problem, []).append(timing)
            index = {}
            for text, timings in by_problem.items():
                if (measured := self.problem(op, text)) is not None:
                    index.setdefault(_kind(measured), []).append((measured, timings))
            self._alike[op.name, target] = index  # whole, for other threads
        return index.get(_kind(problem), ())

    def problem(self, op: Op, text: str) -> Problem | None:
        """The problem that a record is for, parsed once; None for one that `op` no longer has: the record is not used."""
        key = (op.name, text)
        if key not in self._problems:
            try:
                self._problems[key] = op.problem(text)
            except AxisError:
                self._problems[key] = None
        return self._problems[key]

    @staticmethod
    def parse(data: Any, origin: str, text: str = "") -> Store:
        """A store from its JSON form; StoreError names the fault, with its line if `text` is that JSON."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            schema = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise StoreError(f"{origin}: expected a store of schema {SCHEMA}, found {schema!r}")
        if unknown := sorted(data.keys() - {"schema", "verified", "timed"}):
            raise StoreError(
                f"{origin}: expected verified and timed, found {', '.join(unknown)}: this is no store, and will not be replaced by one"
            )
        store = Store()
        for kind, name in ((Verification, "verified"), (Timing, "timed")):
            entries = data.get(name, [])
            if not isinstance(entries, list):
                raise StoreError(
                    f"{origin}: {name}: expected a list of records, found {type(entries).__name__}"
                )
            for place, entry in enumerate(entries):
                try:
                    store.add(_record(kind, entry))
                except (TypeError, ValueError) as error:
                    line = _line(text, name, place)
                    where = f"line {line}: " if line else ""
                    raise StoreError(f"{origin}: {where}{name}[{place}]: {error}") from error
        return store

    @staticmethod
    def read_over_shipped(path: Path) -> Store:
        """The store in `path` on top of the times that come with gristmill; what is in `path` replaces what was shipped."""
        store = _shipped_store().copy()
        own = Store.read(path)
        for timing in own.timings:
            store.add(timing)
        store.verifications.update(own.verifications)
        return store

    @staticmethod
    def read(path: Path) -> Store:
        """The store in `path`; a missing file gives an empty store. StoreError: it is damaged or cannot be read."""
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return Store()
        except UnicodeDecodeError as error:
            raise StoreError(f"{path}: byte {error.start}: not UTF-8 text") from error
        except OSError as error:
            raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise StoreError(f"{path}: line {error.lineno}: {error.msg}") from error
        except (
            RecursionError,
            ValueError,
        ) as error:  # brackets without end, an integer of thousands of digits
            raise StoreError(f"{path}: {error}") from error
        return Store.parse(data, str(path), text)


def stores_in(folder: Path) -> dict[str, Store]:
    """The stores of a folder, by the names of their files."""
    return {path.name: Store.read(path) for path in sorted(folder.glob("*.json"))}


@cache
def shipped_files() -> dict[str, Store]:
    """`stores_in` `SHIPPED`; nobody adds to them."""
    return stores_in(SHIPPED)


@cache
def shipped_times() -> tuple[Timing, ...]:
    """Every measured time under `SHIPPED`. Their ``code`` is empty: they apply to a kernel's present code."""
    return tuple(timing for store in shipped_files().values() for timing in store.timings)


@cache
def _shipped_store() -> Store:
    """`shipped_times`, indexed; nobody adds to it."""
    store = Store()
    for timing in shipped_times():
        store.add(timing)
    return store


def _record(kind: type[Verification] | type[Timing], entry: Any) -> Verification | Timing:
    """A record from its JSON form; TypeError or ValueError for unknown fields or fields of another type."""
    if not isinstance(entry, dict):
        raise TypeError(f"expected a record, found {type(entry).__name__}")
    if kind is Timing:
        entry = {**entry, "samples": tuple(entry.get("samples", ()))}
    record = kind(**entry)
    texts = (
        "op",
        "kernel",
        "code",
        "problem",
        "target",
        "toolchain",
        *(("config", "reason") if kind is Verification else ("timing", "origin")),
    )
    for name in texts:
        if not isinstance(getattr(record, name), str):
            raise TypeError(f"{name}: expected text, found {getattr(record, name)!r}")
    if isinstance(record, Verification):
        if not isinstance(record.ok, bool):
            raise TypeError(f"ok: expected true or false, found {record.ok!r}")
        if record.error is not None and not _is_number(record.error):
            raise TypeError(f"error: expected a number or null, found {record.error!r}")
        return record
    if not isinstance(record.config, dict) or not all(
        isinstance(v, str | int | float) for v in record.config.values()
    ):
        raise TypeError(f"config: expected names with numbers or text, found {record.config!r}")
    for us in (record.us, *record.samples):
        if not _is_number(us) or not 0 <= us < math.inf:
            raise ValueError(f"expected microseconds, found {us!r}")
    return record


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _line(text: str, name: str, place: int) -> int:
    """The line of entry `place` of the list `name` in a store's text; 0 if it cannot be determined."""
    decoder, start = json.JSONDecoder(), text.find(f'"{name}": [')
    if start < 0:
        return 0
    position = text.index("[", start) + 1
    for index in range(place + 1):
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        if index == place:
            break
        _, position = decoder.raw_decode(text, position)
    return text.count("\n", 0, position) + 1


def distance(a: Problem, b: Problem, dynamic: frozenset[str] = frozenset()) -> float:
    """Powers of two between two problems; infinite if they differ in more than sizes.

    Static axes add up. Of the axes in `dynamic` the one furthest apart counts: those of a ragged batch (tokens,
    sequences, total context) grow together. A static size of 0 means "none" (no window), which is near no size.
    """
    total, furthest = 0.0, 0.0
    for (name, left), (other_name, right) in zip(a.values, b.values, strict=True):
        if left == right:
            continue
        if name != other_name or not _is_size(left) or not _is_size(right):
            return math.inf
        if name not in dynamic and not (left and right):
            return math.inf
        step = abs(math.log2(max(float(left or 0), 0.5)) - math.log2(max(float(right or 0), 0.5)))
        if name in dynamic:
            furthest = max(furthest, step)
        else:
            total += step
    return total + furthest


def _kind(problem: Problem) -> tuple[Any, ...]:
    """The values of a problem that are no sizes: between problems that differ in them, `distance` is infinite."""
    return tuple(int if _is_size(value) else value for _, value in problem.values)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
