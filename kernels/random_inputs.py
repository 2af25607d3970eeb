"""Random arguments of a problem, for tests, verification and benchmarks: drawn from one seed, in the order of the calls."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from gristmill.kernel_registry.problem import Problem
from gristmill.kernels.common import torch_dtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Draw:
    """Draws the tensors of `problem`.

    `source` is the device of the generator. By default values are drawn on the CPU and do not depend on `device`. The source may be `device` itself
    for tensors that are too large to be drawn on a CPU.
    """

    def __init__(self, problem: Problem, seed: int, device: str, source: str = "cpu") -> None:
        import torch

        self.problem, self.device, self.source = problem, device, source
        self.generator = torch.Generator(source).manual_seed(seed)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the problem's axis x."""
        return torch_dtype(self.problem.text("x"))

    def normal(self, *shape: int) -> Tensor:
        """float32 from the standard normal distribution."""
        import torch

        return torch.randn(*shape, generator=self.generator, dtype=torch.float32, device=self.source)

    def uniform(self, *shape: int) -> Tensor:
        """float32 from [0, 1)."""
        import torch

        return torch.rand(*shape, generator=self.generator, dtype=torch.float32, device=self.source)

    def rows(self, *shape: int, spread: float = 1.0) -> Tensor:
        """Normal values, each row times its own e^(spread · normal): rows of very different sizes, so that a wrong row is detected."""
        return self.normal(*shape) * (spread * self.normal(*shape[:-1], 1)).exp()

    def experts(self, *shape: int, power: float, foreign: float) -> Tensor:
        """int32 ids of the problem's `e` experts, low ones more often (by `power`), the second of more than two never; a share of
        `foreign` is -1, an expert of another rank."""
        import torch

        e = self.problem.integer("e")
        ids = (e * self.uniform(*shape) ** power).int().clamp(max=e - 1)
        ids[(ids == 1) & (e > 2)] = 2
        ids[self.uniform(*shape) < foreign] = -1
        return ids.to(torch.int32)

    def stored(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors in the problem's dtype, on its device."""
        return [tensor.to(self.dtype).to(self.device) for tensor in tensors]
