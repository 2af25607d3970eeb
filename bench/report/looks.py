"""The look of series: colour and mark identify the provider and are equal on all charts; the fill distinguishes its kernels."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from gristmill.bench.report.rows import PageRow

PROVIDERS = ("gristmill", "torch", "flashinfer", "humming", "deepgemm", "aiter", "onnxruntime")
"""Providers with a colour of their own. All others share the last colour, with a mark chosen by their name."""

COLOURS = len(PROVIDERS) + 1
SHAPES = (
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "m-3.6-3.6h7.2v7.2h-7.2z",
    "m0-4.8l4.6 8h-9.2z",
    "m0-5l5 5l-5 5l-5-5z",
)
"""Outlines of marks about their centre."""

VARIANTS = 8
"""Fills and sizes of a mark (page.css): the number of kernels of one provider and operation before a look repeats."""


@dataclass(frozen=True)
class Look:
    """Indices into COLOURS, SHAPES and VARIANTS."""

    colour: int
    shape: int
    variant: int = 0

    @property
    def classes(self) -> str:
        """CSS classes of marks and lines."""
        return f"c{self.colour} v{self.variant}"

    @property
    def outline(self) -> str:
        """The mark as an SVG path relative to its centre."""
        return SHAPES[self.shape]


Looks = dict[tuple[str, str], Look]
"""(operation, series) -> how it is drawn, on all charts of a page."""


def provider_look(provider: str, variant: int = 0) -> Look:
    """The colour and mark of a provider: a function of its name alone, so the rest of a page cannot change them."""
    if provider in PROVIDERS:
        place = PROVIDERS.index(provider)
        return Look(place, place % len(SHAPES), variant % VARIANTS)
    return Look(COLOURS - 1, zlib.crc32(provider.encode()) % len(SHAPES), variant % VARIANTS)


def looks(rows: Iterable[PageRow]) -> Looks:
    """A look per series: colour and mark of its provider, and a variant counted among that provider's series of the operation."""
    members: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        members.setdefault((row.op, row.provider), set()).add(row.series)
    return {
        (op, series): provider_look(provider, variant)
        for (op, provider), names in members.items()
        for variant, series in enumerate(sorted(names))
    }
