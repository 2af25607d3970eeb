"""moe_block_scaled_cutedsl_sm100: experts with weights and activations in NVFP4, MXFP4 or MXFP8 in CuTe DSL for data-centre Blackwell.

permute; tokens quantized once, in their own order; first product, which gathers their codes and scales, with biases and silu(gate) · up as its
epilogue; its rows quantized; second product; combine. Products are `grouped_linear/block_scaled_cutedsl/product.py`, the others Triton's. NVFP4 has a
factor for each row.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, ConfigValue, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.block_scaled_cutedsl.shapes import FORMS
from gristmill.kernels.moe import _block_scaled_chain, _chain
from gristmill.kernels.moe.grouped_linear.block_scaled_cutedsl import product as experts

if TYPE_CHECKING:
    from gristmill.kernels.calls import MoeCall

OWN = ("bn", "slots", "epilogue")
"""Entries of a product's configuration that differ between the products; here their names end with its number."""


def launch(config: Config, call: MoeCall) -> None:
    """x [T, H] -> out [T, H]; without a workspace it allocates one. No synchronisation. Compiles at first use."""
    form = str(QuantScheme.parse(str(config["scheme"])).activation)
    first, second = (partial(experts.product, config_of(config, number)) for number in (1, 2))
    _block_scaled_chain.run(form, first, second, call)


def config_of(config: Config, number: int) -> Config:
    """The configuration of a product. The first gathers rows of x and applies the activation."""
    own = {name: config[f"{name}{number}"] for name in OWN}
    shared = {name: config[name] for name in ("scheme", "ctas", "x", "arch")}
    return {**own, "gather": number == 1, **shared}


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    w, x, (e, h, i) = problem.text("w"), problem.text("x"), problem.integers(*"ehi")
    if problem["act_order"]:
        return "takes groups of neighbouring columns, not act-order"
    return experts.refusal(w, x, e, 2 * i, h, True) or experts.refusal(w, x, e, h, i, False)


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """The best tiles of both products; then others of either."""
    m, top_k, e, h, i = problem.integers("m", "top_k", "e", "h", "i")
    scheme, x = str(QuantScheme.parse(problem.text("w"))), problem.text("x")
    rows, flags = m * top_k, problem.flags("epilogue")
    before = {"silu_mul"} | ({"bias"} if "w13_bias" in flags else set()) | ({"clamp"} & set(flags))
    after = "bias" if "w2_bias" in flags else "none"
    best, *others = experts.configs(scheme, rows, e, 2 * i, "+".join(sorted(before)), True, x, target)
    after_it, *more = experts.configs(scheme, rows, e, h, after, False, x, target)
    pairs = ((best, after_it), *((one, after_it) for one in others), *((best, one) for one in more))
    for first, second in pairs:
        shared: dict[str, ConfigValue] = {name: first[name] for name in ("scheme", "ctas", "x", "arch")}
        both = ((f"{name}{number}", one[name]) for number, one in ((1, first), (2, second)) for name in OWN)
        yield shared | dict(both)


def config(problem: Problem, target: Target) -> Config:
    """The first of `space`."""
    return next(iter(space(problem, target)))


EXAMPLES = (
    "m=0,top_k=2,e=3,h=128,i=128,w={w}",
    "m=9,top_k=3,e=5,h=128,i=256,w={w}",
    "m=70,top_k=2,e=4,h=384,i=128,x=fp16,w={w},epilogue=w13_bias+w2_bias+clamp",
    "m=300,top_k=1,e=1,h=256,i=128,w={w},epilogue=w2_bias",
    "m=40,top_k=8,e=64,h=128,i=128,w={w}",
)
NARROW = (
    "m=9,top_k=3,e=5,h=160,i=96,w={w}",
    "m=70,top_k=2,e=4,h=224,i=192,w={w},epilogue=w13_bias+w2_bias+clamp",
)
"""Sizes that are not whole tiles of scales; codes of 4 bits that are multiplied as bytes have none."""
KERNEL = Kernel(
    op="moe",
    name="moe_block_scaled_cutedsl_sm100",
    provider="gristmill",
    language="cutedsl",
    target=f"{__name__}:launch",
    requires=experts.REQUIRES,
    summary="tokens quantized once and gathered as codes; persistent warp-specialized tcgen05 with block scales; biases and activation as epilogues",
    accepts=accepts,
    config=config,
    space=space,
    reads=_chain.ORDER,
    workspace=_block_scaled_chain.workspace,
    layouts=("scales128x4_v1",),
    examples=(
        *(example.format(w=w) for w in FORMS for example in EXAMPLES),
        *(example.format(w=w) for w, form in FORMS.items() if not form.mixed for example in NARROW),
    ),
    priority=60,
)
