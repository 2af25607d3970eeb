"""linear_fp32 in Triton, in one launch: programs share K where there are few tiles, and the last one of a tile adds their sums in order.

Tensor cores add products of 16-bit numbers with a few bits less care than float32 has, so they add one step of K at a time, from zero, and steps
are added in float32. A weight in float32 is multiplied in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase, matrix_product
from gristmill.kernels.common import row_stride
from gristmill.kernels.lazy_triton import jit, tl

if TYPE_CHECKING:
    import torch

    from gristmill.kernels.calls import LinearFp32Call

TILES = 1024
"""Tiles up to which programs share K: each has a counter at the start of the workspace, whatever the configuration."""
COUNTER_BYTES = 4 * TILES
MOST_PARTS = 32
"""Programs that share a tile: the last one reads as many parts of its sums."""
MULTIPROCESSORS = 132
"""Of a target that does not say how many it has."""


# Rows are no part of the program: what is verified on fewer serves all.
@jit(do_not_specialize=["m"])  # type: ignore[call-arg, untyped-decorator]
def linear_fp32_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    parts,
    counters,
    m,
    n,
    k,
    x_stride,
    steps,
    FP32: tl.constexpr,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Rows of x times rows of W over `steps` steps of K. counters: zero, and zero again afterwards. FP32: multiply in float32."""
    ns = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    part = tl.program_id(2)
    of_x = x + rows[:, None] * x_stride
    of_weight = weight + ns.to(tl.int64)[:, None] * k
    first = part * steps * BK
    total = tl.zeros([BM, BN], dtype=tl.float32)
    for k0 in range(first, tl.minimum(first + steps * BK, k), BK):
        ks = k0 + tl.arange(0, BK)
        inside = (ks < k)[None, :]
        a = tl.load(of_x + ks[None, :], mask=(rows < m)[:, None] & inside, other=0.0)
        w = tl.load(of_weight + ks[None, :], mask=(ns < n)[:, None] & inside, other=0.0)
        # Subtracted: Triton makes what a product is added to the start of its sums.
        if FP32:
            total -= tl.dot(a.to(tl.float32), tl.trans(w.to(tl.float32)), input_precision="ieee")
        else:
            total -= tl.dot(a, tl.trans(w))
    total = -total
    last = True
    if PARTS > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        own = parts + tile.to(tl.int64) * PARTS * BM * BN
        own += tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        tl.store(own + part * BM * BN, total)
        tl.debug_barrier()  # all threads have written: the one that counts releases what they wrote
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == PARTS - 1
        if last:
            total = tl.zeros([BM, BN], dtype=tl.float32)
            for other in range(PARTS):
                total += tl.load(own + other * BM * BN, cache_modifier=".cg")
            tl.store(counters + tile, 0)
    if last:
        if BIAS:
            total += tl.load(bias + ns, mask=ns < n, other=0.0)[None, :]
        at = rows[:, None] * n + ns[None, :]
        tl.store(out + at, total, mask=(rows < m)[:, None] & (ns < n)[None, :])


def launch(config: Config, call: LinearFp32Call) -> None:
    """x [..., K], W [N, K] -> out float32 [..., N]; without a workspace it allocates one."""
    import torch

    (n, k), m = call.weight.shape, call.out.numel() // call.out.shape[-1]
    if m == 0:
        return
    bm, bn, bk, parts = (int(config[name]) for name in ("bm", "bn", "bk", "parts"))
    steps = cdiv(cdiv(k, bk), parts)
    grid = (cdiv(n, bn), cdiv(m, bm), parts)
    counters = sums = call.out
    if parts > 1:
        space = call.workspace
        if space is None:
            size = _bytes(m, n, config)
            space = torch.zeros(size, dtype=torch.uint8, device=call.x.device)
        counters = space[:COUNTER_BYTES].view(torch.int32)
        sums = space[COUNTER_BYTES:].view(torch.float32)
    linear_fp32_kernel[grid](
        call.x,
        call.weight,
        call.out if call.bias is None else call.bias,
        call.out,
        sums,
        counters,
        m,
        n,
        k,
        row_stride(call.x),
        steps,
        FP32=_in_float32(call.x, call.weight),
        BIAS=call.bias is not None,
        PARTS=parts,
        BM=bm,
        BN=bn,
        BK=bk,
        num_warps=config["warps"],
        num_stages=config["stages"],
    )


def _in_float32(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return 4 in (x.element_size(), weight.element_size())


def shape(problem: Problem, target: Target, bn: int, share: float = 1.0) -> dict[str, int]:
    """A tile of `bn` rows of W, and as many parts of K as give every multiprocessor `share` programs."""
    m, n, k = problem.integers(*"mnk")
    # Without matrix instructions each thread multiplies its own part of a tile, which has to be small.
    by_thread = "fp32" in (problem["x"], problem["w"]) or not target.features & {"mma.bf16", "mfma", "wmma"}
    bm = 16 if m <= 16 else 32 if m <= 32 or by_thread else 64
    bk = 32 if by_thread else 128 if bm < 64 else 64
    tiles = cdiv(m, bm) * cdiv(n, bn)
    parts = int(share * (target.multiprocessors or MULTIPROCESSORS)) // max(1, tiles)
    parts = max(1, min(parts, MOST_PARTS)) if tiles <= TILES else 1
    parts = cdiv(cdiv(k, bk), cdiv(cdiv(k, bk), parts))  # all of which have a step
    return {"bm": bm, "bn": bn, "bk": bk, "parts": parts, "warps": 4, "stages": 3}


def config(problem: Problem, target: Target) -> Config:
    """A program for each multiprocessor."""
    return shape(problem, target, _columns(problem))


def _columns(problem: Problem) -> int:
    return 16 if problem.integer("n") <= 16 else 32


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Other widths, parts of K and depths of the pipeline; the default first."""
    widths = [_columns(problem)] + [bn for bn in (16, 32, 64) if bn != _columns(problem)]
    made: dict[tuple[int, ...], Config] = {}
    for share in (1.0, 0.5, 2.0):
        for bn in widths:
            for stages in (3, 4):
                one = {**shape(problem, target, bn, share), "stages": stages}
                made.setdefault(tuple(one.values()), one)
    return made.values()


def invariant_config(problem: Problem, target: Target) -> Config:
    """One tile and one division of K for any number of rows."""
    one = shape(problem.with_values(m=1), target, _columns(problem))
    return {**one, "parts": 1, "bm": 16}


def misfit(problem: Problem, config: Config) -> str | None:
    """None, or why a configuration does not run `problem`."""
    tiles = cdiv(problem.integer("m"), int(config["bm"])) * cdiv(problem.integer("n"), int(config["bn"]))
    if int(config["parts"]) > 1 and tiles > TILES:
        return f"programs share K of up to {TILES} tiles, not of {tiles}"
    return None


def workspace(problem: Problem, config: Config) -> Workspace:
    """Counters of tiles, and the sums of each part of K; nothing where programs do not share K."""
    m, n = problem.integers(*"mn")
    return Workspace(_bytes(m, n, config), zeroed=True) if int(config["parts"]) > 1 and m else Workspace()


def _bytes(m: int, n: int, config: Config) -> int:
    bm, bn = int(config["bm"]), int(config["bn"])
    return COUNTER_BYTES + 4 * cdiv(m, bm) * cdiv(n, bn) * int(config["parts"]) * bm * bn


def aot(target: Target, config: Callable[[Problem, Target], Config] = config) -> list[AotCase]:
    """Logits of a few tokens, of many, and of a weight in float32, in the default configuration or another one."""
    op = default_registry().op("linear_fp32")
    ints = dict.fromkeys(("m", "n", "k", "x_stride", "steps"), "i32")
    types = {"x": "*bf16", "bias": "*fp32", "out": "*fp32", "parts": "*fp32", "counters": "*i32"}
    cases = []
    for name, text, weight in (
        ("few", "m=16", "*bf16"),
        ("many", "m=4096", "*bf16"),
        ("float32", "m=16,w=fp32", "*fp32"),
    ):
        one = config(op.problem(f"n=256,k=7168,{text}"), target)
        sizes = {part.upper(): one[part] for part in ("parts", "bm", "bn", "bk")}
        cases.append(
            AotCase(
                name,
                linear_fp32_kernel,
                {**types, "weight": weight, **ints},
                {"FP32": weight == "*fp32", "BIAS": False, **sizes},
                {"num_warps": int(one["warps"]), "num_stages": int(one["stages"])},
                ("n", "k", "x_stride"),
                () if weight == "*fp32" else matrix_product(target, int(one["bm"])),
            )
        )
    return cases


def aot_invariant(target: Target) -> list[AotCase]:
    """The same in the tile for any number of rows."""
    return aot(target, invariant_config)


KERNELS = tuple(
    Kernel(
        op="linear_fp32",
        name=name,
        provider="gristmill",
        language="triton",
        target=f"{__name__}:launch",
        aot=f"{__name__}:{compiled}",
        requires=Requirement(code="triton"),
        summary=summary,
        config=config_of,
        space=space_of,
        misfit=misfit,
        workspace=workspace,
        batch_invariant=space_of is None,
        priority=priority,
    )
    for name, compiled, config_of, space_of, priority, summary in (
        (
            "linear_fp32_triton",
            "aot",
            config,
            space,
            50,
            "one launch; programs share K and add their sums in order",
        ),
        (
            "linear_fp32_invariant_triton",
            "aot_invariant",
            invariant_config,
            None,
            20,
            "one tile for any number of rows",
        ),
    )
)
