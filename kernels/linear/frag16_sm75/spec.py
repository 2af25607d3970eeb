"""Weight-only linear for sm_75 (Turing): linear_w4a16_decode_sm75, linear_w8a16_decode_sm75 and linear_gguf_decode_sm75 at M <= 8,
linear_w4a16_gemm_sm75, linear_w8a16_gemm_sm75 and linear_gguf_gemm_sm75 at any M.

They are the kernels for sm_80 (../frag16_sm80), which read the same tiles in the same formats, with two products of 8 k in the place of one
of 16, and loads through registers in the place of cp.async. fp16 activations alone: Turing's tensor cores have no bf16. They are PTX of
compute_75 in a library of its own, which the driver compiles for newer GPUs as well; there, those for sm_80 come first. Sums meet in a fixed
order: results are bitwise repeatable.
"""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.frag16_sm75 import decode, gemm
from gristmill.kernels.linear.frag16_sm80 import gemm as gemm_sm80
from gristmill.kernels.linear.frag16_sm80._kernel import GGUF, TRIED, W4, W8, Family, Schedule
from gristmill.kernels.linear.frag16_sm80.formats import FORMATS, format_of

PROCESSORS = 40
"""Multiprocessors of a target that does not say how many it has: those of a T4."""
REQUIRES = Requirement(
    features=(frozenset({"mma.f16", "ldmatrix"}),), vendors=("nvidia",), code="cuda:compute_75"
)


DECODE = Schedule(
    name="decode",
    ranked=decode.ranked,
    workspace_bytes=decode.workspace_of,
    rows=decode.ROWS,
    summary="M <= 8, fp16: {} straight into tensor-core operands, deterministic split of K",
    priority=95,
    examples={
        "w4a16": (
            "m=8,n=257,k=4096,x=fp16,w=int4_g128",
            "m=5,n=66,k=1152,x=fp16,w=int4_g32_zp,epilogue=bias+silu_mul",
            "m=7,n=130,k=2056,x=fp16,w=int4_g32",
            "m=1,n=4112,k=1000,x=fp16,w=int4_g64_zp,epilogue=bias+residual",
            "m=3,n=40,k=640,x=fp16,w=int4_g128_zp,act_order=true",
            "m=8,n=48,k=16384,x=fp16,w=mxfp4",
            "m=2,n=66,k=2064,x=fp16,w=nvfp4,epilogue=bias+silu_mul",
        ),
        "w8a16": (
            "m=8,n=257,k=4096,x=fp16,w=int8_g128",
            "m=1,n=4112,k=1000,x=fp16,w=int8_g32,epilogue=bias+residual",
            "m=7,n=300,k=2056,x=fp16,w=fp8_block",
            "m=5,n=130,k=1000,x=fp16,w=fp8_ch,epilogue=bias+silu_mul",
        ),
        "gguf": (
            "m=8,n=257,k=4096,x=fp16,w=int4_g32_min",
            "m=5,n=66,k=1152,x=fp16,w=int5_g32,epilogue=bias+silu_mul",
            "m=1,n=4112,k=992,x=fp16,w=int5_g32_min,epilogue=bias+residual",
            "m=3,n=300,k=2064,x=fp16,w=int6_g16",
        ),
    },
)
GEMM = Schedule(
    name="gemm",
    ranked=gemm.ranked,
    workspace_bytes=lambda n, config: gemm_sm80.workspace_of(config),
    rows=None,
    summary="any M, fp16: {} decoded in registers for up to 64 rows of x, loads through registers, deterministic stream-K",
    priority=94,
    examples={
        "w4a16": (
            "m=17,n=257,k=4096,x=fp16,w=int4_g128",
            "m=64,n=520,k=1152,x=fp16,w=int4_g32_zp,epilogue=bias+silu_mul",
            "m=9,n=1030,k=2056,x=fp16,w=int4_g32",
            "m=130,n=264,k=1000,x=fp16,w=int4_g64_zp,epilogue=bias+residual",
            "m=300,n=40,k=640,x=fp16,w=int4_g128_zp,act_order=true",
            "m=1,n=512,k=16384,x=fp16,w=int4_g64",
            "m=200,n=130,k=4128,x=fp16,w=mxfp4",
            "m=40,n=1030,k=2064,x=fp16,w=nvfp4,epilogue=bias+residual",
        ),
        "w8a16": (
            "m=17,n=257,k=4096,x=fp16,w=int8_g128",
            "m=64,n=520,k=1152,x=fp16,w=int8_g32,epilogue=bias+silu_mul",
            "m=100,n=1030,k=2056,x=fp16,w=fp8_block",
            "m=33,n=130,k=1000,x=fp16,w=fp8_ch,epilogue=bias+residual",
        ),
        "gguf": (
            "m=17,n=257,k=4096,x=fp16,w=int4_g32_min",
            "m=64,n=520,k=992,x=fp16,w=int5_g32,epilogue=bias+silu_mul",
            "m=100,n=1030,k=2048,x=fp16,w=int5_g32_min",
            "m=33,n=130,k=1008,x=fp16,w=int6_g16,epilogue=bias+residual",
        ),
    },
)


def kernel(schedule: Schedule, family: Family) -> Kernel:
    """The spec of the kernel of a schedule that multiplies weights of a family."""
    forms = [form for form in FORMATS if form.layout in family.layouts]

    def accepts(problem: Problem) -> str | None:
        scheme = QuantScheme.parse(problem.text("w"))
        if format_of(scheme) not in forms:
            known = ", ".join(dict.fromkeys(name for form in forms for name in form.schemes))
            return f"multiplies weight-only {family.formats}, not {scheme}; it is compiled for {known}"
        if problem.text("x") != "fp16":
            return f"takes fp16 activations alone, as Turing's tensor cores do, not {problem.text('x')}"
        if schedule.rows is not None and problem.integer("m") > schedule.rows:
            return f"made for M <= {schedule.rows}, not {problem.integer('m')}"
        return None

    def space(problem: Problem, target: Target) -> Iterable[Config]:
        weight = format_of(QuantScheme.parse(problem.text("w")))
        if weight is None:
            raise ValueError(f"{schedule.name} for sm_75: {accepts(problem)}")
        m, n, k = problem.integers(*"mnk")
        for _, one in schedule.ranked(weight, m, n, k, target.multiprocessors or PROCESSORS)[:TRIED]:
            yield {"format": weight.name, "tile_bytes": weight.tile_bytes, **one}

    def config(problem: Problem, target: Target) -> Config:
        return next(iter(space(problem, target)))

    def workspace(problem: Problem, config: Config) -> Workspace:
        # Counters, zero before a call and after it, then the sums of every part of K.
        size = schedule.workspace_bytes(problem.integer("n"), config)
        return Workspace(size, zeroed=size > 0)

    return Kernel(
        op="linear",
        name=f"linear_{family.name}_{schedule.name}_sm75",
        provider="gristmill",
        language="cuda",
        target=f"gristmill.kernels.linear.frag16_sm75._launch_{schedule.name}:launch",
        requires=REQUIRES,
        summary=schedule.summary.format(family.summary),
        accepts=accepts,
        config=config,
        space=space,
        workspace=workspace,
        layouts=family.layouts,
        examples=schedule.examples[family.name],
        priority=schedule.priority,
    )


KERNELS = tuple(kernel(schedule, family) for schedule in (DECODE, GEMM) for family in (W4, W8, GGUF))
