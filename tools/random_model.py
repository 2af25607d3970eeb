"""A model with random weights, for timing. Tensors are generated on the device on first access; nothing is read or stored."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from gristmill.kernel_registry.policy import Policy
from gristmill.quant.checkpoints.table import WeightTable
from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.devices import parse_device
from gristmill.runtime.errors import UsageError
from gristmill.runtime.layers.plans import BLOCK_SIZE, Plans
from gristmill.runtime.loader.load import parse_dtype, parse_scheme
from gristmill.runtime.models import Model, build_model, model_table
from gristmill.runtime.parallel.mesh import ALONE, Mesh, local_config


class RandomCheckpoint:
    """The tensors of a table: matrices are normal with a standard deviation of 0.01 to 0.1, vectors are around 1.

    The values of a tensor depend only on the seed, its name and the device, not on the order of reads.
    """

    path = Path("random weights")

    def __init__(self, table: WeightTable, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.dtype, self.device, self.seed = dtype, device, seed
        self.shapes: dict[str, tuple[int, ...]] = {}
        for weight in table.weights:
            if weight.stacked:
                raise UsageError(
                    f"{weight.target} has its experts in one tensor: no random weights are made of that kind"
                )
            for index, name in enumerate(weight.part_names()):
                rows = weight.rows[index % len(weight.rows)]
                full = f"{name}.weight" if weight.kind == "linear" else name
                self.shapes[full] = (rows,) if weight.columns is None else (rows, weight.columns)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape."""
        return self.dtype, self.shapes[name]

    def read(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        *,
        dtypes: Collection[torch.dtype] | None = None,
    ) -> Tensor:
        """A tensor on the device."""
        generator = torch.Generator(self.device).manual_seed(crc32(f"{self.seed} {name}".encode()))
        shape = self.shapes[name]
        values = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
        return 1 + 0.05 * values if len(shape) == 1 else values * shape[1] ** -0.5


def random_model(
    config: ModelConfig,
    dtype: str | torch.dtype = "auto",
    quant: str | None = None,
    device: str | torch.device = "auto",
    policy: Policy | None = None,
    seed: int = 0,
    block_size: int = BLOCK_SIZE,
    mesh: Mesh = ALONE,
) -> Model:
    """A model with random weights; arguments as in `load_model`. UsageError: an unknown dtype, scheme or device, stacked experts."""
    plans = Plans(parse_device(device, policy), parse_dtype(dtype, config), policy, block_size, mesh=mesh)
    table = model_table(config)
    checkpoint = RandomCheckpoint(table, plans.dtype, plans.device, seed)
    weights = Weights(
        checkpoint, table, plans.dtype, plans.device, parse_scheme(quant), rank=mesh.rank, world=mesh.world
    )
    return build_model(local_config(config, mesh), weights, plans)
