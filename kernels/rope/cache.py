"""Tables of cosines and sines for rotary embeddings, with the scalings of checkpoints.

`rope_cache` follows the arithmetic of the models' own code (float32 frequencies, angles as float32 products) because
that is what checkpoints were trained and are evaluated with; with precision="float64" it gives the mathematical values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SLICE = 1 << 16
"""Positions that are computed at a time: a table of ten million takes gigabytes, and should take little beside."""
KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class RopeParameters:
    """Frequencies of a rotary embedding.

    Attributes:
        theta: base.
        kind: ``default``; ``linear`` (every frequency / factor); ``llama3`` (Llama 3.1: long wavelengths / factor, short ones kept, between
            them interpolated); ``yarn`` (Peng et al., 2023: interpolation by wavelength and a factor on cosines and sines); ``longrope``
            (Ding et al., 2024: a divisor for each pair and a factor on cosines and sines; the divisors up to the original length).
        original: positions that the model was trained on before scaling.
        attention_factor, mscale, mscale_all_dim: the factor of yarn and longrope, or the two coefficients whose quotient gives yarn's.
        truncate: yarn's correction range is widened to whole dimensions.
        factors: divisors of the frequency of each pair, for the kinds ``default`` (the rope_freqs of GGUF files) and ``longrope``.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"rope type {self.kind!r} is not supported; supported: {', '.join(KINDS)}")
        if not self.theta > 1:
            raise ValueError(f"rope theta must be over 1, got {self.theta}")
        if not self.factor > 0:
            raise ValueError(f"rope factor must be positive, got {self.factor}")
        if self.kind in ("llama3", "yarn", "longrope") and self.original < 1:
            raise ValueError(
                f"rope type {self.kind} needs original_max_position_embeddings, got {self.original}"
            )
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"llama3 rope needs 0 < low_freq_factor < high_freq_factor, got {self.low_freq_factor} and "
                f"{self.high_freq_factor}"
            )
        if self.kind == "yarn" and not 0 < self.beta_slow <= self.beta_fast:
            raise ValueError(
                f"yarn needs 0 < beta_slow <= beta_fast, got {self.beta_slow} and {self.beta_fast}"
            )

    @classmethod
    def parse(
        cls, table: Mapping[str, Any], theta: float | None = None, max_positions: int | None = None
    ) -> RopeParameters:
        """From a checkpoint's ``rope_parameters`` (or ``rope_scaling``, which does not contain theta: pass `theta`).

        `max_positions` is the configuration's max_position_embeddings, for tables without factor or original length.
        ValueError names a missing entry or an unsupported type.
        """
        kind = table.get("rope_type", table.get("type", "default")) or "default"
        if kind == "default":
            return cls(
                theta=float(_entry(table, "rope_theta", kind, theta)), factors=tuple(table.get("factors", ()))
            )
        kind = "longrope" if kind == "su" else kind  # its name in Phi-3's first files
        stretches = kind in ("yarn", "longrope")
        original = int(
            table.get("original_max_position_embeddings") or (max_positions if stretches else 0) or 0
        )
        ratio = max_positions / original if stretches and max_positions and original else None
        options: dict[str, Any] = {}
        if kind == "llama3":
            options = {
                key: float(_entry(table, key, kind)) for key in ("low_freq_factor", "high_freq_factor")
            }
        elif kind == "yarn":
            options = {
                key: None if table.get(key) is None else float(table[key])
                for key in ("attention_factor", "mscale", "mscale_all_dim")
            }
            options |= {
                "beta_fast": float(table.get("beta_fast") or 32),
                "beta_slow": float(table.get("beta_slow") or 1),
            }
            options["truncate"] = bool(table.get("truncate", True))
        elif kind == "longrope":
            given = table.get("attention_factor")
            options["attention_factor"] = None if given is None else float(given)
            options["factors"] = tuple(map(float, _entry(table, "short_factor", kind)))
        return cls(
            theta=float(_entry(table, "rope_theta", kind, theta)),
            kind=kind,
            factor=float(_entry(table, "factor", kind, ratio)),
            original=original,
            **options,
        )

    @property
    def table_factor(self) -> float:
        """The factor of cosines and sines: 1 except for yarn and longrope."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            return math.sqrt(1 + math.log(max(self.factor, 1.0)) / math.log(self.original))
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @property
    def softmax_factor(self) -> float:
        """The factor of the softmax scale in DeepSeek's attention: the square of yarn's mscale_all_dim, else 1."""
        if self.kind != "yarn" or not self.mscale_all_dim:
            return 1.0
        return _mscale(self.factor, self.mscale_all_dim) ** 2


def _entry(table: Mapping[str, Any], key: str, kind: str, default: Any = None) -> Any:
    value = table.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"rope type {kind} needs {key}; the table has {', '.join(table) or 'nothing'}")
    return value


def _mscale(factor: float, coefficient: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0


def inverse_frequencies(rot: int, parameters: RopeParameters, precision: str = "float32") -> Tensor:
    """Radians per position for each pair, [rot / 2], in `precision` (``float32`` or ``float64``)."""
    import torch

    if rot < 2 or rot % 2:
        raise ValueError(f"the rotated part of a head must be even and at least 2, got {rot}")
    if precision not in ("float32", "float64"):
        raise ValueError(f"precision must be float32 or float64, got {precision!r}")
    dtype = getattr(torch, precision)
    periods = parameters.theta ** (torch.arange(0, rot, 2, dtype=torch.int64).to(dtype) / rot)
    plain = 1.0 / periods
    if parameters.kind == "linear":
        return plain / parameters.factor
    if parameters.kind == "llama3":
        return _llama3(plain, parameters)
    if parameters.kind == "yarn":
        low, high = _correction_range(rot, parameters)
        ramp = ((torch.arange(rot // 2, dtype=dtype) - low) / (high - low)).clamp(0, 1)
        unscaled_share = 1 - ramp
        return 1.0 / (parameters.factor * periods) * (1 - unscaled_share) + plain * unscaled_share
    if not parameters.factors:
        return plain
    if len(parameters.factors) != rot // 2:
        raise ValueError(f"{len(parameters.factors)} factors of frequencies were given for {rot // 2} pairs")
    return 1.0 / (torch.tensor(parameters.factors, dtype=dtype) * periods)


def _llama3(plain: Tensor, parameters: RopeParameters) -> Tensor:
    import torch

    low, high, factor = parameters.low_freq_factor, parameters.high_freq_factor, parameters.factor
    wavelength = 2 * math.pi / plain
    blend = (parameters.original / wavelength - low) / (high - low)
    between = (1 - blend) * plain / factor + blend * plain
    long, short = wavelength > parameters.original / low, wavelength < parameters.original / high
    return torch.where(long, plain / factor, torch.where(short, plain, between))


def _correction_range(rot: int, parameters: RopeParameters) -> tuple[float, float]:
    """The pairs between which yarn blends: those that turn beta_fast and beta_slow times over the original length."""

    def pair(turns: float) -> float:
        return rot * math.log(parameters.original / (turns * 2 * math.pi)) / (2 * math.log(parameters.theta))

    low, high = pair(parameters.beta_fast), pair(parameters.beta_slow)
    if parameters.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rot - 1)
    return low, high + 0.001 if low == high else high


def rope_cache(
    rot: int,
    positions: int,
    parameters: RopeParameters,
    device: torch.device | str = "cpu",
    precision: str = "float32",
) -> Tensor:
    """Cosines, then sines, of every position: float32 [positions, rot], as `rotary_embedding` reads it."""
    import torch

    if positions < 1:
        raise ValueError(f"a rope table needs at least one position, got {positions}")
    frequencies = inverse_frequencies(rot, parameters, precision)
    factor = parameters.table_factor
    table = torch.empty(positions, rot, dtype=torch.float32, device=device)
    for first in range(0, positions, SLICE):
        rows = table[first : first + SLICE]
        angles = torch.arange(first, first + len(rows), dtype=frequencies.dtype)[:, None] * frequencies
        rows.copy_(torch.cat([angles.cos() * factor, angles.sin() * factor], dim=-1).float())
    return table
