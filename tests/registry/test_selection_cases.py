"""The hand-written table of selections against the real registry (and fake kernels for code that does not
exist yet)."""

from __future__ import annotations

import pytest

from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.select import Candidate, Selection, select
from gristmill.kernel_registry.store import Store, Verification, config_key, target_key
from gristmill.kernel_registry.target import Target
from tests.registry import fakes
from tests.registry.selection_cases import BUILDS, FAKE, FAKES, POLICIES, REFUSED, SELECTED, rows

REGISTRY = default_registry()


@pytest.fixture(autouse=True)
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The builds of the table say which levels are compiled, whatever library is present."""
    monkeypatch.setattr("gristmill.kernels.native.manifest", dict)


def _choose(
    op: str, problem: str, target: str, build: str, policy: str, store: Store | None = None
) -> Selection:
    definition = REGISTRY.op(op)
    return select(
        definition,
        definition.problem(problem),
        REGISTRY.kernels_of(op),
        Target.parse(target),
        BUILDS[build],
        store or Store(),
        POLICIES[policy],
        foreign=store is None,
    )


def _verify(op: Op, at: Problem, target: Target, build: Build, candidates: tuple[Candidate, ...]) -> Store:
    store = Store()
    for c in candidates:
        if c.config is not None:
            store.add(
                Verification(
                    op=op.name,
                    kernel=c.kernel.name,
                    code=c.kernel.verification_hash(c.config),
                    config=config_key(c.config),
                    problem=str(op.verification(at, c.kernel, c.config)),
                    target=target_key(target),
                    toolchain=build.key(),
                    ok=True,
                )
            )
    return store


def _of(selection: Selection, name: str) -> Candidate:
    return next(c for c in selection.candidates if c.kernel.name == name)


@pytest.mark.parametrize("row", rows(SELECTED), ids=" ".join)
def test_selected(row: list[str]) -> None:
    op, problem, target, build, policy, expected = row
    name, _, level = expected.partition("@")
    selection = _choose(op, problem, target, build, policy)
    assert selection.best is not None and selection.best.kernel.name == name, [
        c.as_dict() for c in selection.candidates
    ]
    assert selection.best.verdict == "unverified"  # the device is not present
    if level:
        assert (selection.best.config or {})["level"] == level
    definition = REGISTRY.op(op)
    store = _verify(
        definition, definition.problem(problem), Target.parse(target), BUILDS[build], selection.candidates
    )
    verified = _choose(op, problem, target, build, policy, store)
    assert verified.best is not None and (verified.best.kernel.name, verified.best.verdict) == (
        name,
        "selected",
    )


FAMILIES = {
    "int4_g128": "w4a16",
    "int4_g128_zp": "w4a16",
    "int8_ch": "w8a16",
    "fp8_ch": "w8a16",
    "mxfp4": "w4a16",
    "nvfp4": "w4a16",
}
"""Scheme -> the part of its kernels' names."""


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_100", "sm_103", "sm_120", "sm_121"])
def test_native_weight_only_products_come_first_on_every_gpu_that_runs_them(target: str) -> None:
    """Decode up to 16 rows, stream-K above; the Triton kernel behind both. Turing has kernels of its own, by a library of its own."""
    for scheme, family in FAMILIES.items():
        for m in (1, 16, 64):
            problem = f"m={m},n=4096,k=4096,w={scheme}"
            order = [c.kernel.name for c in _choose("linear", problem, target, "ptx80", "-").candidates]
            schedules = ("decode", "gemm") if m <= 16 else ("gemm",)
            names = [f"linear_{family}_{schedule}_sm80" for schedule in schedules]
            assert order[: len(names) + 1] == [*names, "linear_w_triton"], problem
            older = _choose("linear", f"{problem},x=fp16", "sm_75", "ptx80", "-")
            assert older.best is not None and older.best.kernel.name == "linear_w_triton", problem
            order = [
                c.kernel.name
                for c in _choose("linear", f"{problem},x=fp16", "sm_75", "ptx75", "-").candidates
            ]
            schedules = ("decode", "gemm") if m <= 8 else ("gemm",)
            names = [f"linear_{family}_{schedule}_sm75" for schedule in schedules]
            assert order[: len(names) + 1] == [*names, "linear_w_triton"], problem


@pytest.mark.parametrize("row", rows(REFUSED), ids=" ".join)
def test_refused(row: list[str]) -> None:
    op, problem, target, build, policy, name, verdict, reason = row
    candidate = _of(_choose(op, problem, target, build, policy), name)
    assert candidate.verdict == verdict and reason in "; ".join(candidate.reasons), candidate.as_dict()


@pytest.mark.parametrize("row", rows(FAKE), ids=" ".join)
def test_walls_between_architectures(row: list[str]) -> None:
    name, target, build, verdict = row[:4]
    fallback = fakes.kernel("fallback")
    selection = select(
        fakes.OP,
        fakes.problem(),
        [FAKES[name], fallback],
        Target.parse(target),
        BUILDS[build],
        Store(),
        Policy(),
        foreign=True,
    )
    assert selection.best is not None and selection.best.kernel.name == (
        name if verdict == "serves" else "fallback"
    )
    if verdict != "serves":
        candidate = _of(selection, name)
        assert candidate.verdict == verdict and row[4] in "; ".join(candidate.reasons), candidate.as_dict()


def test_the_table_is_large_and_says_why() -> None:
    selected, refused, fake = rows(SELECTED), rows(REFUSED), rows(FAKE)
    negatives = len(refused) + sum(row[3] != "serves" for row in fake)
    assert len(selected) + len(refused) + len(fake) >= 150 and negatives >= 50
    assert all(len(row) == 6 for row in selected) and all(len(row) == 8 and row[7] for row in refused)
    assert all(len(row) == (4 if row[3] == "serves" else 5) for row in fake)
    assert len({tuple(row) for row in selected + refused + fake}) == len(selected + refused + fake)
    assert {row[0] for row in selected} == set(REGISTRY.ops), "every operation has rows"
    schemes = {
        str(REGISTRY.op("linear").problem(r[1]).text("w")).partition(".")[0]
        for r in selected
        if r[0] == "linear"
    }
    assert {
        "bf16",
        "int4_g32",
        "int4_g64",
        "int4_g128",
        "int4_ch",
        "int8_ch",
        "int8_g128",
        "fp8",
        "fp8_ch",
        "fp8_block",
        "mxfp8",
        "mxfp4",
        "nvfp4",
    } <= schemes


_EVERYWHERE = ("sm_90", "gfx942", "cpu:avx2", "sm_100", "sm_120")


@pytest.mark.parametrize("kernel", list(REGISTRY.all_kernels()), ids=lambda k: k.name)
def test_every_kernel_is_reachable(kernel) -> None:
    """With everything installed and the kernel pinned, some target and some problem use it."""
    build = Build.of(
        {
            "torch": "2.13.0",
            "triton": "3.9.0",
            "flashinfer-python": "1.0",
            "humming-kernels": "1.0",
            "nvidia-cutlass-dsl": "9",
            "apache-tvm-ffi": "9",
            "onnxruntime": "9",
            "onnx": "9",
        },
        triton_backends=("cuda", "hip"),
        cpu_levels=("base", "avx2"),
        cuda_archs=("sm_90a", "sm_100a", "compute_75", "compute_80", "compute_89", "compute_120f"),
        hip_archs=("gfx942",),
        offers=frozenset(kernel.requires.offers),
    )
    op = REGISTRY.op(kernel.op)
    policy = Policy(pins={op.name: (kernel.name,)}, strict=True)
    texts = [*op.examples, *op.bench] + [row[1] for row in rows(SELECTED) if row[0] == op.name]
    for target in map(Target.parse, _EVERYWHERE):
        for text in texts:
            if (
                select(op, op.problem(text), [kernel], target, build, Store(), policy, foreign=True).best
                is not None
            ):
                return
    pytest.fail(f"no target of {_EVERYWHERE} and no example runs {kernel.name}")


ALIKE = [
    ("sm_80", "sm_86"),
    ("sm_80", "sm_87"),
    ("sm_80", "sm_89"),
    ("sm_100", "sm_103"),
    ("sm_120", "sm_121"),
]


@pytest.mark.parametrize(("known", "other"), ALIKE)
def test_relatives_of_a_compiled_target_are_served_by_the_same_kernels(known: str, other: str) -> None:
    """Targets that the tables and the compile matrix do not list behave like their listed relatives: the same
    kernels accept the hardware, but for products of FP8, which sm_89 brought, and one of gristmill's own for every operation but
    collectives; one is selected for all."""
    build = Build.of(
        {"torch": "2.13.0", "triton": "3.9.0"}, triton_backends=("cuda",), cuda_archs=("sm_90a",)
    )
    for op in REGISTRY.ops.values():
        kernels = [
            kernel
            for kernel in REGISTRY.kernels_of(op.name)
            if not any("mma.fp8" in features for features in kernel.requires.features)
        ]
        served = [
            {k.name for k in kernels if not k.requires.check_hardware(Target.parse(target))}
            for target in (known, other)
        ]
        assert served[0] == served[1], op.name
        assert op.family == "collective" or any(name.endswith("triton") for name in served[0]), op.name
        chosen = [
            [_selected(op, text, Target.parse(target), build) for text in op.bench]
            for target in (known, other)
        ]
        assert chosen[0] == chosen[1] and None not in chosen[0], op.name


def _selected(op: Op, text: str, target: Target, build: Build) -> str | None:
    kernels = REGISTRY.kernels_of(op.name)
    chosen = select(op, op.problem(text), kernels, target, build, Store(), Policy(), foreign=True)
    return None if chosen.best is None else chosen.best.kernel.name
