"""The result file of a run: written after every cell, so that a killed run keeps its rows and the next one goes on."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.peers.group import Cell
from lab.peers.race import CANDIDATES
from lab.result import write_result

CLOSE = 1.05
"""The ratio up to which our time counts as that of the best peer."""
SAME = ("gristmill", "device", "python", "torch", "triton")
"""What the runs that share a file have in common, beside the driver and the peers."""


class OtherRunError(ValueError):
    """The file has rows of another device or other versions."""


class ResultFile:
    """The rows of a run, in `path` if that is given.

    Args:
        about: the environment (`environment`).
        libraries: peer -> its version, or why it is absent.
    """

    def __init__(self, path: Path | None, about: Mapping[str, Any], libraries: Mapping[str, str]) -> None:
        self.path = path
        self.data: dict[str, Any] = {
            "about": dict(about),
            "libraries": dict(libraries),
            "candidates": CANDIDATES,
            "trying": None,
            "rows": [],
        }
        if path is not None and path.exists():
            self._go_on(json.loads(path.read_text(encoding="utf-8")))

    @property
    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.data["rows"]
        return rows

    @property
    def done(self) -> set[str]:
        """Names of the cells that have rows."""
        return {cell_of(row).name for row in self.rows}

    def begin(self, cell: Cell) -> None:
        """Note the cell that is measured now: if the process dies, the next one leaves it out."""
        self.data["trying"] = vars(cell)
        self._write()

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the row of the cell."""
        self.rows.append(dict(row))
        self.data["trying"] = None
        self.data["summary"] = summaries(self.rows)
        self._write()

    def failed(self, cell: Cell, why: str) -> None:
        """Add a row without times."""
        self.add(
            {
                **vars(cell),
                "candidates": [],
                "peer": None,
                "ratio": None,
                "wrong": {},
                "refused": {"all": why},
            }
        )

    def retry(self) -> None:
        """Remove the rows that compare nothing, so that their cells are measured again."""
        self.data["rows"] = [row for row in self.rows if row["ratio"] is not None]

    def _go_on(self, before: Mapping[str, Any]) -> None:
        if changed := self.differences(self.data, before, "driver", "libraries"):
            raise OtherRunError(
                f"{self.path} has rows of another run, with {', '.join(changed)}: name another file"
            )
        self.data["rows"] = list(before["rows"])
        if before["trying"] is not None:
            self.failed(Cell(**before["trying"]), "the process ended while it measured this cell")

    @staticmethod
    def differences(here: Mapping[str, Any], there: Mapping[str, Any], *more: str) -> list[str]:
        """In what runs differ that may not share a file: `SAME`, and of `more` ``driver`` and ``libraries``."""
        own, other = (
            {
                **data["about"],
                "driver": (data["about"]["gpu"] or {}).get("driver_version"),
                "libraries": data.get("libraries"),
            }
            for data in (here, there)
        )
        return [
            f"{name} {other[name]} (here {own[name]})" for name in (*SAME, *more) if own[name] != other[name]
        ]

    def _write(self) -> None:
        if self.path is not None:
            rows = self.data.pop("rows")
            self.data["rows"] = rows  # last, a line each
            write_result(self.path, self.data)


def cell_of(row: Mapping[str, Any]) -> Cell:
    return Cell(row["group"], row["model"], row["problem"])


def summaries(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`summary` of each group."""
    return [
        summary(name, [one for one in rows if one["group"] == name])
        for name in dict.fromkeys(one["group"] for one in rows)
    ]


def summary(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the rows of a group: how many compare us with a peer, the geometric mean of our time over the best peer's, the share of ratios up to
    `CLOSE`, and the row with the largest. None without such rows. inexact: in how many a peer that was timed has an error over the tolerance."""
    compared = [row for row in rows if row["ratio"] is not None]
    found: dict[str, Any] = {"group": name, "cells": len(rows), "compared": len(compared)}
    found["wrong"] = sum(len(row["wrong"]) for row in rows)
    found["inexact"] = Counter(name for row in rows for name in row.get("inexact", ()))
    if not compared:
        return found | {"mean_ratio": None, "close": None, "worst": None}
    ratios = [row["ratio"] for row in compared]
    worst = max(compared, key=lambda row: row["ratio"])
    return found | {
        "mean_ratio": math.exp(statistics.fmean(map(math.log, ratios))),
        "close": sum(ratio <= CLOSE for ratio in ratios) / len(ratios),
        "worst": {name: worst[name] for name in ("model", "problem", "ratio", "kernel", "peer")},
    }
