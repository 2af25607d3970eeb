"""Linear in HIP for AMD GPUs and few rows of x, W dense or in 4- or 8-bit integers, in bf16 and fp16, with every epilogue.

The algorithm is wvSplitK of vLLM (csrc/rocm/skinny_gemms.cu: the lanes of a wave share the K of a row, x is kept in LDS), with the
deterministic split over workgroups of its wvSplitKrc; the integer weights are ours. `_linear_wv_splitk.hip` has the code.
"""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernel_registry.target import Target

CODE = (
    "gfx90a",
    "gfx942",
    "gfx950",
    "gfx1100",
    "gfx1101",
    "gfx1102",
    "gfx1150",
    "gfx1151",
    "gfx1200",
    "gfx1201",
)
"""Architectures that cmake/hip.cmake compiles for."""
TOKENS = 8
"""Most rows of x."""
PAIRS = 8
"""Pairs of rows of W per workgroup: one per wave."""
WIDTH = {"dense": 8, "int4": 32, "int8": 16}
"""Columns of W in 16 bytes."""
LDS_BYTES = 32 << 10
"""Of x in LDS per workgroup: two workgroups fit a compute unit of 64 KiB."""
MOST_LDS = 64 << 10
"""Of a workgroup."""
COUNTERS = 4096
"""Bytes of counters at the start of the workspace."""
PROCESSORS = 64
"""Compute units of a target that does not say how many it has."""


def rows_kept(m: int) -> int:
    """Rows of x that the instance for m rows keeps in LDS."""
    return next(rows for rows in (1, 2, 4, 8) if m <= rows)


def format_of(scheme: QuantScheme) -> str:
    """The name of a scheme's code format in `WIDTH`."""
    return "dense" if scheme.is_dense else scheme.weight


def _accepts(problem: Problem, quantized: bool) -> str | None:
    scheme, x = QuantScheme.parse(problem.text("w")), problem.text("x")
    m, k = problem.integers(*"mk")
    if x not in ("fp16", "bf16"):
        return f"takes fp16 or bf16 activations, not {x}"
    if not quantized and scheme.name != x:
        return f"multiplies dense weights in the dtype of x, not {scheme}"
    if quantized and (
        scheme.weight not in ("int4", "int8") or not scheme.is_named or scheme.activation is not None
    ):
        return f"multiplies weights in 4- or 8-bit integers, not {scheme}"
    if problem["act_order"]:
        return "takes no act-order"
    if m > TOKENS:
        return f"made for M <= {TOKENS}, not {m}"
    width = WIDTH[format_of(scheme)]
    if k % width:
        return f"reads 16 bytes of W at a time: needs K a multiple of {width}, got K={k}"
    return None


def accepts_dense(problem: Problem) -> str | None:
    """W in the dtype of x, M <= 8, K in whole 16 bytes."""
    return _accepts(problem, quantized=False)


def accepts_integers(problem: Problem) -> str | None:
    """int4 and int8, in groups or per channel, with and without zero points; M <= 8, K in whole 16 bytes."""
    return _accepts(problem, quantized=True)


def _tiles(problem: Problem) -> int:
    return cdiv(cdiv(problem.integer("n"), 2), PAIRS)


def config(problem: Problem, target: Target) -> Config:
    """As many columns of x in LDS as fit; K split over workgroups while the rows of W occupy less than half of the device."""
    return _split(problem, target, 1.0)


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Half, and twice, the workgroups per compute unit."""
    return [_split(problem, target, load) for load in (1.0, 0.5, 2.0)]


def _split(problem: Problem, target: Target, load: float) -> Config:
    scheme, k = QuantScheme.parse(problem.text("w")), problem.integer("k")
    form, units = format_of(scheme), (target.multiprocessors or PROCESSORS)
    lanes = target.wave_size or 64
    step = WIDTH[form] * lanes
    blocks = max(1, int(2 * units * load))
    longest = LDS_BYTES // (2 * rows_kept(max(1, problem.integer("m")))) // step * step
    tiles = _tiles(problem)
    wanted = min(16, blocks // tiles) if 4 * tiles <= COUNTERS else 1
    # Parts of whole rounds of a wave, at least four of them each.
    parts = max(1, min(wanted, k // (4 * step)))
    chunk = max(step, min(longest, cdiv(cdiv(k, parts), step) * step))
    split = cdiv(k, chunk) if parts > 1 else 1
    return {
        "format": form,
        "x": problem.text("x"),
        "group": scheme.group_size or 0,
        "arch": target.arch,
        "lanes": lanes,
        "chunk": chunk,
        "split": min(split, 16),
        "blocks": blocks,
    }


def misfit(problem: Problem, config: Config) -> str | None:
    """None, or why the rows of x do not fit in LDS with the chunk of a configuration for fewer rows."""
    m, k = problem.integers(*"mk")
    size = 2 * rows_kept(max(1, m)) * min(int(config["chunk"]), k) + 16
    return (
        None
        if size <= MOST_LDS
        else f"chunks of {config['chunk']} columns of {m} rows take {size} bytes of LDS"
    )


def workspace_bytes(m: int, n: int, split: int) -> int:
    """Bytes of counters and sums; 0 without a split."""
    tiles = cdiv(cdiv(n, 2), PAIRS)
    return COUNTERS + split * tiles * PAIRS * 2 * rows_kept(max(1, m)) * 4 if split > 1 else 0


def workspace(problem: Problem, config: Config) -> Workspace:
    """Counters, zero before a call and after it, then the sums of every part of K."""
    size = workspace_bytes(problem.integer("m"), problem.integer("n"), int(config["split"]))
    return Workspace(size, zeroed=size > 0)


KERNELS = tuple(
    Kernel(
        op="linear",
        name=name,
        provider="gristmill",
        language="hip",
        target="gristmill.kernels.linear.wv_splitk_hip._launch:launch",
        requires=Requirement(vendors=("amd",), code="hip", brings=CODE),
        summary=summary,
        accepts=accepts,
        config=config,
        space=space,
        misfit=misfit,
        workspace=workspace,
        layouts=(layout,),
        examples=examples,
        priority=110,
    )
    for name, layout, accepts, summary, examples in (
        (
            "linear_wv_splitk_hip",
            "dense_v1",
            accepts_dense,
            "few rows: the lanes of a wave share K, x in LDS; deterministic split of K",
            (
                "m=0,n=32,k=64",
                "m=1,n=1,k=8",
                "m=5,n=257,k=2056,epilogue=bias",
                "m=8,n=34,k=4104,x=fp16,w=fp16,epilogue=bias+residual+silu_mul",
                "m=3,n=17,k=520,x=fp16,w=fp16",
            ),
        ),
        (
            "linear_w_wv_splitk_hip",
            "plain_v1",
            accepts_integers,
            "few rows: codes decoded beside the product, scaled per group in float32; deterministic split of K",
            (
                "m=8,n=257,k=4096,w=int4_g128",
                "m=7,n=66,k=96,x=fp16,w=int4_g32_zp,epilogue=bias+silu_mul",
                "m=4,n=33,k=4128,w=int4_ch_zp,epilogue=residual",
                "m=2,n=17,k=2064,w=int8_ch,epilogue=bias",
                "m=1,n=31,k=4096,x=fp16,w=int8_g128",
                "m=6,n=40,k=2048,x=fp16,w=int4_g64",
            ),
        ),
    )
)
