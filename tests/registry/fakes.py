"""A made-up operation with kernels, targets and builds: selection without devices or code."""

from __future__ import annotations

from typing import Any

from gristmill.kernel_registry.arguments import Tensor, Weight, WorkspaceArgument
from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.layout import Layout
from gristmill.kernel_registry.op import Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.store import Store, Timing, Verification, config_key, target_key
from gristmill.kernel_registry.target import Target

OP = Op(
    name="mix",
    family="fake",
    summary="a linear-like operation",
    axes=(
        Axis("m", "int", "rows", dynamic=True),
        Axis("n", "int", "columns", minimum=1),
        Axis("k", "int", "depth", minimum=1),
        Axis("x", "dtype", "activations", default="bf16"),
        Axis("w", "scheme", "weights", default="int4_g128"),
    ),
    arguments=(
        Tensor("x", "... k"),
        Weight("weight", "n k"),
        Tensor("bias", "n", optional=True),
        WorkspaceArgument(),
    ),
    returns=(Tensor("out", "... n"),),
    reference=lambda *arguments: None,
    inputs=lambda problem, seed, device: [],
    cost=lambda p: Cost(
        bytes=p.integer("n") * p.integer("k") // 2, flops=2 * p.integer("m") * p.integer("n") * p.integer("k")
    ),
    tolerance=lambda p: Tolerance("exact", 0.0),
    examples=("m=1,n=8,k=128",),
    bench=("m=1,n=8,k=128",),
    bucket="m",
)

BUILD = Build.of(
    {"torch": "2.13.0", "triton": "3.9.0"},
    triton_backends=("cuda", "hip"),
    cpu_levels=("base", "avx2", "avx512"),
)
H200 = Target.parse("h200")


def problem(text: str = "m=16,n=4096,k=4096") -> Problem:
    return OP.problem(text)


def kernel(name: str, *, requires: Requirement | None = None, **others: Any) -> Kernel:
    settings: dict[str, Any] = {"op": "mix", "provider": "test", "language": "python", "target": "json:dumps"}
    return Kernel(name=name, requires=requires or Requirement(), **(settings | others))


def layout(name: str, factor: float, schemes: tuple[str, ...] = ("int4_g128",)) -> Layout:
    return Layout(
        name=name,
        summary="",
        slots=("codes",),
        schemes=schemes,
        pack="json:dumps",
        unpack="json:loads",
        size=lambda scheme, n, k: int(scheme.weight_bytes(n, k) * factor),
    )


def verified(
    *kernels: Kernel,
    at: Problem | None = None,
    target: Target = H200,
    ok: bool = True,
    store: Store | None = None,
) -> Store:
    """Returns a store in which these kernels matched the reference (or did not)."""
    store = store or Store()
    for size in (
        (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192) if at is None else (at.integer("m"),)
    ):
        where = (at or problem()).with_values(m=size)
        for k in kernels:
            store.add(
                Verification(
                    op="mix",
                    kernel=k.name,
                    code=k.verification_hash(k.config(where, target)),
                    config=config_key(k.config(where, target)),
                    problem=str(OP.verification(where, k, k.config(where, target))),
                    target=target_key(target),
                    toolchain=BUILD.key(),
                    ok=ok,
                    reason="" if ok else "error 0.2 is over the tolerance 0.006",
                )
            )
    return store


def timed(store: Store, name: str, us: float, at: Problem | None = None, target: Target = H200) -> Store:
    store.add(
        Timing(
            op="mix",
            kernel=name,
            code="",
            config={},
            problem=str(at or problem()),
            target=target_key(target),
            toolchain=BUILD.key(),
            us=us,
        )
    )
    return store
