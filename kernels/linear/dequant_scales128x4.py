"""Weights of scales128x4_v1 in torch alone: scales are put in order, then it is `linear_dequant_torch`. Runs anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.linear import dequant_torch

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall

SCHEMES = ("nvfp4", "mxfp4", "mxfp8")


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K], a weight packed as scales128x4_v1 -> out [..., N or N / 2], rounded as `linear_dequant_torch` does."""
    import torch

    from gristmill.kernels.linear.op import OP
    from gristmill.quant.layouts._scales128x4 import untiled

    scheme = QuantScheme.parse(str(config["scheme"]))
    codes, tiles, row_scale = call.weight
    scales = untiled(tiles, codes.shape[0], scheme.groups(call.x.shape[-1]))
    if scheme.has_global:
        scales = scales.view(torch.float8_e4m3fn)
    zeros = torch.empty(0, dtype=torch.uint8, device=codes.device)
    blocks = torch.empty(0, dtype=torch.int32, device=codes.device)
    plain = [codes, scales, zeros, row_scale, blocks, blocks]
    rest = (call.bias, call.residual, call.silu_mul, call.n, call.workspace, call.codes, call.scales)
    dequant_torch.launch(config, OP.Call(call.x, plain, *rest, call.out))


def accepts(problem: Problem) -> str | None:
    """The layout's schemes, with any activation format."""
    scheme = QuantScheme.parse(problem.text("w")).weights
    if scheme not in SCHEMES:
        return f"multiplies {', '.join(SCHEMES)}, not {scheme}"
    return "takes groups of neighbouring columns, not act-order" if problem["act_order"] else None


KERNEL = Kernel(
    op="linear",
    name="linear_dequant_scales128x4",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="scales out of their tiles, rows dequantized, then torch's product",
    accepts=accepts,
    config=dequant_torch.config,
    layouts=("scales128x4_v1",),
    dequantizes=True,
    priority=-1,
)
