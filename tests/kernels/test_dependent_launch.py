"""Programmatic dependent launch of kernels in Triton: where it is on, that every kernel waits first, and what specs declare. The compile matrix reads
the machine code; tests/gpu/test_dependent_launch.py runs chains."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module

import pytest
import torch

from gristmill.kernel_registry.kernel import load_attribute
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels import dependent_launch

KERNELS = [
    kernel
    for kernel in default_registry().all_kernels()
    if kernel.language == "triton" and kernel.provider == "gristmill" and kernel.waits
]


def of_kernel(text: str) -> dict[str, str]:
    """The first statement of each function of a module that takes OVERLAP."""
    return {
        node.name: ast.unparse(next(part for part in node.body if not _is_docstring(part)))
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and "OVERLAP" in [argument.arg for argument in node.args.args]
    }


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def text_of(module: str) -> str:
    return inspect.getsource(import_module(module))


def launches(text: str) -> tuple[int, int]:
    """How many launches of kernels a module has, and how many are overlapped, of norms by their `options`."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    of_grid = [call for call in calls if isinstance(call.func, ast.Subscript)]
    unpacked = [
        any(
            word.arg is None and ast.unparse(word.value).startswith(("overlapped(", "options("))
            for word in call.keywords
        )
        for call in of_grid
    ]
    return len(of_grid), sum(unpacked)


ELSEWHERE = {"gristmill.kernels.activation.gelu_and_mul_triton"}
"""Modules that launch the functions of others."""
MODULES = sorted(
    {*(kernel.module for kernel in KERNELS), "gristmill.kernels.kv_cache._quantize_and_cache_triton"}
    - ELSEWHERE
)


@pytest.mark.parametrize("module", MODULES)
def test_every_kernel_waits_before_anything_else(module: str) -> None:
    text = text_of(module)
    first = of_kernel(text)
    assert first and set(first.values()) == {"begin(OVERLAP)"}
    count, overlapped = launches(text)
    assert count == overlapped > 0


def test_a_kernel_that_waits_late_is_seen() -> None:
    module = MODULES[-1]
    text = text_of(module)
    late = text.replace("    begin(OVERLAP)\n", "    zero = 0\n    begin(OVERLAP)\n")
    assert set(of_kernel(late).values()) != {"begin(OVERLAP)"}
    plain = text.replace("**overlapped(", "**dict(")
    assert plain != text and launches(plain)[1] == 0


def test_specs_declare_it() -> None:
    """Kernels that let the next one start early, and no others, say so, also those that launch the function of another module."""
    assert len(KERNELS) >= 11
    for kernel in default_registry().all_kernels():
        if kernel.language == "triton" and kernel.provider == "gristmill":
            own = "begin" in vars(import_module(kernel.module))
            cases = load_attribute(kernel.aot)(Target.parse("sm_90")) if kernel.aot else ()
            launched = any("OVERLAP" in case.function.arg_names for case in cases)
            assert kernel.waits == kernel.triggers == (own or launched), kernel.name


def test_compilations_ahead_of_time_give_every_argument() -> None:
    """An argument that neither the signature nor the constants of a case have stops its compilation, which the matrix may come to days later."""
    for kernel in default_registry().all_kernels():
        if kernel.language != "triton" or kernel.provider != "gristmill" or kernel.aot is None:
            continue
        for name in ("sm_80", "sm_90", "gfx942"):
            place = Target.parse(name)
            if kernel.requires.check_hardware(place):
                continue
            for case in load_attribute(kernel.aot)(place):
                given, wanted = {*case.signature} | {*case.constants}, {*case.function.arg_names}
                assert given >= wanted, f"{kernel.name}/{case.name} on {name} lacks {sorted(wanted - given)}"


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_compilations_ahead_of_time_are_those_of_launches(kernel: object) -> None:
    cases = load_attribute(kernel.aot)  # type: ignore[attr-defined]
    for name, on in (
        ("sm_75", False),
        ("sm_89", False),
        ("sm_90", True),
        ("sm_120", True),
        ("gfx942", False),
    ):
        assert {case.constants["OVERLAP"] for case in cases(Target.parse(name))} == {on}, name


@pytest.mark.parametrize(
    "capability,hip,interpreted,on",
    [
        ((9, 0), None, False, True),
        ((12, 1), None, False, True),
        ((8, 9), None, False, False),
        ((9, 4), "6.4", False, False),
        ((9, 0), None, True, False),
    ],
)
def test_where_launches_are_overlapped(
    capability: tuple[int, int], hip: str | None, interpreted: bool, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(dependent_launch, "interpreting", lambda: interpreted)
    options = dependent_launch._options.__wrapped__(0)
    assert options == ({"OVERLAP": True, "launch_pdl": True} if on else {"OVERLAP": False})
    assert dependent_launch.overlapped(torch.empty(1)) == {"OVERLAP": False}
