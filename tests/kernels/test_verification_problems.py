"""A configuration is verified on a problem that it fits: every kernel, its default and shipped configurations, public models, buckets.

No device is needed. The libraries for Hopper say what they refuse where a call names no device: such a call checks its arguments and
launches nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.plan import bucket_sizes
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import config_key, shipped_times
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.wv_splitk_hip import spec as linear_wv_splitk_hip
from tests.kernels import native_answers
from tests.kernels.public_models import MODELS, RANKS, experts, linears

REGISTRY = default_registry()
TARGETS = ("h200", "sm_80", "sm_89", "sm_120", "gfx942", "cpu:avx2", "cpu:amx", "cpu:neon_i8mm")
LARGEST = 96 << 20
"""Bytes that a verification reads and writes at most, of operations whose weights are cut."""
LINEAR_SCHEMES = ("bf16", "int4_g128", "int8_ch", "fp8_block.fp8_g128", "mxfp4")
MORE_LINEAR_SCHEMES = (
    *("int4_g64", "int4_g32", "int4_g128_zp", "int4_ch", "int8_g128", "fp8_ch", "fp8_block", "nvfp4"),
    *("fp8_ch.fp8_token", "int8_ch.int8_token", "int4_g32.int8_g32"),
)
EXPERT_SCHEMES = ("bf16", "int4_g128", "mxfp4", "fp8_block.fp8_g128")


def linear() -> list[str]:
    return sorted(
        {f"n={n},k={k},epilogue={e}" for m in MODELS.values() for r in RANKS for n, k, e in linears(m, r)}
    )


def moe() -> set[str]:
    return {
        f"top_k={one.top_k},e={one.count},h={model.hidden},i={one.inner},epilogue={model.epilogue}"
        for model in MODELS.values()
        for ranks in RANKS
        for one in experts(model, ranks)
    }


def grouped_linear() -> Iterator[str]:
    for model in MODELS.values():
        for ranks in RANKS:
            for e in experts(model, ranks):
                yield f"e={e.count},n={2 * e.inner},k={model.hidden},epilogue=silu_mul,gather={e.top_k}"
                yield f"e={e.count},n={model.hidden},k={e.inner}"


def paged_attention() -> set[str]:
    return {
        f"heads={max(1, model.heads // ranks)},kv_heads={max(1, model.kv_heads // ranks)},head_dim={model.head_dim}"
        for model in MODELS.values()
        for ranks in RANKS
        if model.latent is None and model.heads % ranks == 0 and max(ranks, model.kv_heads) % ranks == 0
    }


def of_latents(text: str) -> set[str]:
    return {
        text.format(heads=model.heads // ranks, one=model.latent)
        for model in MODELS.values()
        for ranks in RANKS
        if model.latent is not None
    }


def of_hidden(text: str) -> set[str]:
    return {text.format(n=model.hidden, v=model.vocab) for model in MODELS.values()}


STATIC = {
    "linear": (linear, LINEAR_SCHEMES),
    "moe": (moe, EXPERT_SCHEMES),
    "grouped_linear": (grouped_linear, EXPERT_SCHEMES[:3]),
    "paged_attention": (paged_attention, ()),
    "mla_attention": (lambda: of_latents("heads={heads},latent_dim={one.rank},rope_dim={one.rope}"), ()),
    "varlen_attention": (
        lambda: of_latents("heads={heads},kv_heads={heads},qk_dim=192,v_dim={one.v}"),
        (),
    ),
    "rms_norm": (lambda: of_hidden("n={n}"), ()),
    "fused_add_rms_norm": (lambda: of_hidden("n={n}"), ()),
    "sample": (lambda: of_hidden("v={v}"), ()),
    "all_reduce": (lambda: of_hidden("n={n},world=2"), ()),
    "all_reduce_add_rms_norm": (lambda: of_hidden("n={n},world=4"), ()),
}
"""Texts of the static problems of public models by operation, and the schemes of their weights."""


def problems(op: Op, schemes: tuple[str, ...], step: int = 1) -> Iterator[Problem]:
    """Yields the problem of each bucket of each static problem, or of one in `step`, that the operation has."""
    texts = sorted(set(STATIC[op.name][0]()))[::step]
    for text in [f"{text},w={scheme}" for text in texts for scheme in schemes] or texts:
        if (wrong := _misfit(op, text)) is None:
            static = op.static(op.problem(text))
            yield from (op.at_bucket(static, size) for size in bucket_sizes())
        else:
            assert "group" in wrong, wrong  # K of some ranks is no multiple of a group


def _misfit(op: Op, text: str) -> str | None:
    try:
        op.problem(text)
    except ValueError as error:
        return str(error)
    return None


@cache
def target_of(name: str) -> Target:
    return Target.parse(name)


def check(op: Op, kernel: Kernel, problem: Problem, config: Config, asked: set[tuple[str, ...]]) -> None:
    """Asserts that the configuration fits its problem, and a small one on which it is verified."""
    assert kernel.misfit(problem, config) is None, (kernel.name, str(problem), config)
    small = op.verification(problem, kernel, config)
    key = (kernel.name, config_key(config), str(small))
    if key in asked:
        return
    asked.add(key)
    assert kernel.takes(small, config), key
    assert op.shrink is None or op.cost(small).bytes <= LARGEST, key
    answer = native_answers.answer(kernel, small, config)
    assert answer is None or answer >= 0, (*key, answer)


def sweep(op: Op, schemes: tuple[str, ...], step: int = 1, targets: tuple[str, ...] = TARGETS) -> int:
    """Checks the default configurations of every kernel on its targets; returns their number."""
    asked: set[tuple[str, ...]] = set()
    able = {
        kernel: [t for t in map(target_of, targets) if not kernel.requires.check_hardware(t)]
        for kernel in REGISTRY.kernels_of(op.name)
    }
    for problem in problems(op, schemes, step):
        for kernel, of_kernel in able.items():
            if of_kernel and kernel.accepts(problem) is None:
                configs = [kernel.config(problem, target) for target in of_kernel]
                for config in {tuple(sorted(config.items())) for config in configs}:
                    check(op, kernel, problem, dict(config), asked)
    return len(asked)


@pytest.mark.parametrize("name", STATIC)
def test_a_default_configuration_fits_the_problem_that_verifies_it(name: str) -> None:
    """All problems of all operations, but one in so many of those that have many."""
    op, schemes = REGISTRY.op(name), STATIC[name][1]
    assert sweep(op, schemes, {"linear": 32, "moe": 2, "grouped_linear": 4}.get(name, 1)) > 10


@pytest.mark.slow
def test_default_configurations_of_linear_fit_the_problems_that_verify_them() -> None:
    """Of every scheme, for a third of the layers."""
    assert sweep(REGISTRY.op("linear"), (*LINEAR_SCHEMES, *MORE_LINEAR_SCHEMES), 3, ("h200", "gfx942")) > 1000


def test_a_shipped_configuration_fits_the_problem_that_verifies_it() -> None:
    asked: set[tuple[str, ...]] = set()
    for timing in shipped_times():
        op = REGISTRY.op(timing.op)
        kernel = REGISTRY.kernel(op.name, timing.kernel)
        check(op, kernel, op.problem(timing.problem), timing.config, asked)
    assert len(asked) > 500


REPORTED = (
    "m=1,top_k=2,e=8,h=4096,i=14336",  # Mixtral 8x7B
    "m=1,top_k=2,e=8,h=4096,i=7168",  # on two ranks
    "m=2,top_k=2,e=1,h=4096,i=14336",  # whole experts on eight ranks
    "m=1,top_k=2,e=16,h=4096,i=6400",  # Phi-3.5-MoE
    "m=1,top_k=1,e=16,h=5120,i=8192",  # Llama 4 Scout
    "m=1,top_k=1,e=128,h=5120,i=8192",  # Llama 4 Maverick
    "m=1,top_k=2,e=16,h=4096,i=14336",  # Jamba 1.5 Mini
)
"""Experts whose configuration for one token does not fit the problem that `shrink` makes of theirs."""


@pytest.mark.parametrize("scheme", ["int4_g128", "mxfp4"])
@pytest.mark.parametrize("text", REPORTED)
def test_experts_whose_slices_share_k_are_verified_with_a_larger_k(text: str, scheme: str) -> None:
    op, kernel = REGISTRY.op("moe"), REGISTRY.kernel("moe", "moe_sm90")
    problem = op.problem(f"{text},w={scheme}")
    config = kernel.config(problem, target_of("h200"))
    assert op.shrink is not None
    smallest, small = op.shrink(problem), op.verification(problem, kernel, config)
    assert "warpgroups that share K" in str(kernel.misfit(smallest, config))
    assert smallest.integer("i") < small.integer("i") <= 768
    assert small == smallest.with_values(i=small["i"])
    if native_answers.answers(kernel):
        assert (native_answers.answer(kernel, smallest, config) or 0) < 0
        assert (native_answers.answer(kernel, small, config) or 0) > 0


MIRRORED = (
    ("moe_sm90", "moe", "m={m},top_k=2,e=8,h={k},i={k},w=int4_g128"),
    ("moe_epilogue_sm90", "moe", "m={m},top_k=4,e=32,h={k},i={k},w=mxfp4,epilogue=clamp"),
    ("moe_w8a8_sm90", "moe", "m={m},top_k=2,e=8,h={k},i={k},w=fp8_block.fp8_g128"),
    ("grouped_linear_sm90", "grouped_linear", "m={m},e=8,n=4096,k={k},w=int4_g128"),
    ("grouped_linear_sm90", "grouped_linear", "m={m},e=8,n=4096,k={k},w=mxfp4,epilogue=silu_mul"),
    ("linear_w4a16_decode_sm90", "linear", "m={m},n=4096,k={k},w=int4_g128"),
    ("linear_w8a16_decode_sm90", "linear", "m={m},n=4096,k={k},w=int8_ch"),
    ("linear_w4a16_decode_ws_sm90", "linear", "m={m},n=18944,k={k},w=mxfp4"),
    ("linear_w4a16_gemm_ws_sm90", "linear", "m={m},n=4096,k={k},w=int4_g128"),
    ("linear_w4a16_invariant_sm90", "linear", "m={m},n=1024,k={k},w=int4_g128"),
    ("linear_w8a8_sm90", "linear", "m={m},n=2048,k={k},w=fp8_block.fp8_g128"),
)
"""Kernels with the problems whose configurations are tried on other sizes."""


@native_answers.needs_library
@pytest.mark.parametrize(("name", "operation", "text"), MIRRORED)
def test_misfit_says_what_the_library_refuses(name: str, operation: str, text: str) -> None:
    """Configurations of all sizes on all sizes: of each pair both say the same."""
    op, kernel = REGISTRY.op(operation), REGISTRY.kernel(operation, name)
    sizes = [
        op.problem(text.format(m=m, k=k))
        for m in (1, 2, 4, 8, 9, 16, 48, 128, 256)
        for k in (128, 256, 384, 512, 896, 1024, 2048, 14336)
    ]
    accepted = [problem for problem in sizes if kernel.accepts(problem) is None]
    configs: dict[str, Config] = {}
    for problem in accepted:
        for config in (kernel.config(problem, target_of("h200")), *_space(kernel, problem)):
            configs.setdefault(config_key(config), config)
    assert len(configs) > 1
    for config in configs.values():
        for problem in accepted:
            answer = native_answers.answer(kernel, problem, config)
            assert answer is not None
            reason = kernel.misfit(problem, config)
            assert (answer < 0) == (reason is not None), (str(problem), config, answer, reason)


def _space(kernel: Kernel, problem: Problem) -> list[Config]:
    return [] if kernel.space is None else list(kernel.space(problem, target_of("h200")))[:12]


def test_a_chunk_for_fewer_rows_does_not_fit_in_lds() -> None:
    """The launcher of `_linear_wv_splitk.hip` refuses the same; its library needs a HIP compiler."""
    source = (
        Path(linear_wv_splitk_hip.__file__).with_name("_linear_wv_splitk.hip").read_text(encoding="utf-8")
    )
    assert f"shape.lds > ({linear_wv_splitk_hip.MOST_LDS >> 10}u << 10)" in source
    assert "shape.lds = unsigned((1 << tokens) * kept * 2 + 16)" in source
    op, kernel = REGISTRY.op("linear"), REGISTRY.kernel("linear", "linear_wv_splitk_hip")
    one, eight = (op.problem(f"m={m},n=4096,k=14336") for m in (1, 8))
    config = kernel.config(one, target_of("gfx942"))
    assert kernel.misfit(one, config) is None and "of LDS" in str(kernel.misfit(eight, config))
    assert kernel.misfit(eight, kernel.config(eight, target_of("gfx942"))) is None
