"""The table of compiled instances, `instances.json`: weight formats, and the shapes of a CTA under each schedule.

CMake writes one source per format and schedule from it (cmake/frag16_sm90.cmake); this module reads the formats and shapes.
The three schedules:

- ``decode``: M <= 16, warps copy for themselves into rings of their own;
- ``decode_ws``: M <= 16, warp-specialised: one warpgroup copies, the others multiply;
- ``gemm_ws``: any M, warp-specialised, weights are wgmma's register operand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gristmill.kernel_registry.scheme import QuantScheme

TABLE = Path(__file__).parent / "instances.json"
DECODE_ROWS = 16
"""Rows of x that a launch of the decode schedules takes."""
LAUNCH_PARAMETERS = ("m", "split", "depth", "slots", "tile_bytes")
"""Parameters of the shared memory expressions besides the fields of a shape. slots: of a ring with requested `depth`."""


@dataclass(frozen=True, eq=False)
class Format:
    """A compiled weight format, one row of the table.

    Attributes:
        name: its name in the library, `format` in configurations.
        schemes: the schemes that are stored in it.
        layout: the layout of the tiles.
        bits: bits per code.
        tile_bytes: bytes per tile of 16 rows x 128 columns, scales included.
        whole: it has every shape of its schedules, not only the common ones.
        ws8: its slots of weights, by the key of a shape, where tiles of its size leave room for fewer.
        cost: cost of decoding a tile relative to int4_g128, by schedule; two numbers where it depends on the columns of x (8, 16).
        rare: `make test` builds the library without it.
    """

    name: str
    schemes: tuple[str, ...]
    layout: str
    bits: int
    tile_bytes: int
    whole: bool
    ws8: Mapping[str, int]
    cost: Mapping[str, tuple[float, ...]]
    rare: bool


@dataclass(frozen=True, eq=False)
class Schedule:
    """The shapes of a schedule.

    Attributes:
        fields: what the numbers of a shape mean.
        key: the fields that name an instance in a configuration.
        formats: the formats that it is compiled for.
        shared_bytes: dynamic shared memory of a CTA of the decode schedules, a function of a shape's fields and `LAUNCH_PARAMETERS`.
    """

    name: str
    fields: tuple[str, ...]
    key: tuple[str, ...]
    common: tuple[tuple[int, ...], ...]
    more: tuple[tuple[int, ...], ...]
    formats: tuple[Format, ...]
    shared_bytes: Callable[..., int]

    def shapes_of(self, form: Format) -> Iterator[dict[str, int]]:
        """The shapes that a format is compiled for, the common ones first."""
        for row in (*self.common, *(self.more if form.whole else ())):
            shape = dict(zip(self.fields, row, strict=True))
            fewer = form.ws8.get("x".join(str(shape[name]) for name in self.key))
            yield shape if fewer is None else shape | {"ws8": fewer}

    def format_of(self, scheme: QuantScheme) -> Format | None:
        """The format that holds a scheme, if this schedule is compiled for it."""
        return next((form for form in self.formats if scheme.name in form.schemes), None)


@cache
def table() -> dict[str, Any]:
    """The content of `instances.json`."""
    content: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return content


@cache
def limits() -> Mapping[str, int]:
    """``max_depth``, slots of a ring of the decode schedules; ``flag_bytes``, bytes of gemm_ws' workspace that must be zero.
    ``cta_bytes``, the shared memory that a CTA can have, and ``reserved_bytes``, those of it that the system keeps."""
    return dict(table()["limits"])


@cache
def formats() -> Mapping[str, Format]:
    """Every format by name."""
    return {
        name: Format(
            name,
            tuple(row["schemes"]),
            row["layout"],
            row["bits"],
            row["tile_bytes"],
            row["shapes"] == "all",
            row.get("ws8", {}),
            {schedule: tuple(cost) for schedule, cost in row["cost"].items()},
            row.get("rare", False),
        )
        for name, row in table()["formats"].items()
    }


@cache
def schedule(name: str) -> Schedule:
    """A schedule by name. KeyError for one that there is not."""
    row = table()["schedules"][name]
    return Schedule(
        name,
        tuple(row["fields"]),
        tuple(row["key"]),
        tuple(map(tuple, row["shapes"]["common"])),
        tuple(map(tuple, row["shapes"]["more"])),
        tuple(formats()[form] for form, given in table()["formats"].items() if given.get(row["decoder"])),
        _expression(row.get("shared_bytes", "0"), tuple(row["fields"])),
    )


def _expression(text: str, fields: tuple[str, ...]) -> Callable[..., int]:
    """The sum that the library takes from the same text, as a function of a shape's fields and `LAUNCH_PARAMETERS`."""
    parameters = ", ".join((*fields, *LAUNCH_PARAMETERS))
    function: Callable[..., int] = eval(f"lambda {parameters}: {text}", {"__builtins__": {}, "max": max})
    return function
