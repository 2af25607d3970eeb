"""The one table of architectures: name -> features. Standard library only; reads no device."""

from __future__ import annotations

from . import amd, cpu, intel, nvidia
from .facts import FEATURES, ArchFacts

ARCHES: dict[str, ArchFacts] = {f.name: f for f in (*nvidia.ARCHES, *amd.ARCHES, *intel.ARCHES, *cpu.ARCHES)}

VENDORS: tuple[str, ...] = ("nvidia", "amd", "intel", "cpu")

__all__ = ["ARCHES", "FEATURES", "VENDORS", "ArchFacts"]
