"""Specs never import Triton; loading or launching a kernel does, and then replaces every placeholder, in any
thread."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.lazy_triton import PendingConstant, PendingFunction, PendingLanguage, function_of
from gristmill.kernels.load import load

triton = pytest.importorskip("triton", reason="triton is not installed")

HELPERS = """
from __future__ import annotations

from gristmill.kernels import constexpr, jit, tl

OFFSET = constexpr(3)


@jit
def shifted(values):
    return values + OFFSET
"""
KERNELS = """
from __future__ import annotations

from gristmill.kernels import jit, tl
from {helpers} import shifted


@jit
def twice_kernel(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, doubled(shifted(tl.load(x + at))))


@jit
def doubled(values):
    return values * 2


@jit(do_not_specialize=["n"])
def first_kernel(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, 0, mask=at < n)
"""
CALLER = """
from {kernels} import twice_kernel


def launch(x):
    twice_kernel[(1,)](x, BLOCK=8)
"""


def pending(module: ModuleType) -> list[str]:
    """Returns the names in a module that are still placeholders for Triton objects."""
    kinds = (PendingConstant, PendingFunction, PendingLanguage)
    return [name for name, value in vars(module).items() if isinstance(value, kinds)]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType, ModuleType]:
    """Helpers, kernels and a module that launches one, freshly imported."""
    monkeypatch.syspath_prepend(tmp_path)
    names = {part: f"lazy_{part}_{tmp_path.name}" for part in ("helpers", "kernels", "caller")}
    for part, text in (("helpers", HELPERS), ("kernels", KERNELS), ("caller", CALLER)):
        (tmp_path / f"{names[part]}.py").write_text(text.format(**names))
    for name in names.values():
        monkeypatch.delitem(sys.modules, name, raising=False)
    loaded = tuple(importlib.import_module(name) for name in names.values())
    assert len(loaded) == 3
    return loaded


def test_specs_import_neither_triton_nor_torch() -> None:
    """The registry is complete without Triton; loading one of its kernels then fails and names what is
    missing."""
    code = """
import sys
sys.modules["triton"] = None
from gristmill.kernel_registry import default_registry
kernels = [k for k in default_registry().all_kernels() if k.language == "triton"]
print(len(kernels), "torch" in sys.modules)
try:
    from gristmill.kernels.norm import rms_norm_triton
    rms_norm_triton.rms_norm_kernel[(1,)]
except ImportError as error:
    print(error.name)
"""
    path = {"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": ""}
    process = subprocess.run(
        [sys.executable, "-c", code], env=path, capture_output=True, text=True, check=False
    )
    triton_kernels = [kernel for kernel in default_registry().all_kernels() if kernel.language == "triton"]
    assert process.stdout.split() == [str(len(triton_kernels)), "False", "triton.language"], process.stderr
    assert len(triton_kernels) >= 20


def test_a_loaded_kernel_has_no_placeholders() -> None:
    """Holds for all Triton kernels: a launch calls jitted functions and the language itself, at the cost of
    ``triton.jit``."""
    for kernel in default_registry().all_kernels():
        if kernel.language == "triton":
            load(kernel)
            assert pending(sys.modules[kernel.target.partition(":")[0]]) == [], kernel.name


def test_a_launch_completes_every_module_it_needs(modules: tuple[ModuleType, ...]) -> None:
    helpers, kernels, caller = modules
    assert pending(helpers) == ["tl", "OFFSET", "shifted"] and pending(caller) == ["twice_kernel"]
    assert "doubled" in pending(kernels)
    x = torch.arange(8)
    caller.launch(x)
    assert x.tolist() == [2 * (value + 3) for value in range(8)]
    assert pending(helpers) == pending(kernels) == pending(caller) == []
    assert caller.twice_kernel is kernels.twice_kernel
    assert helpers.tl is sys.modules["triton.language"]


def test_a_function_is_jitted_once_with_its_options(
    modules: tuple[ModuleType, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, dict[str, object]]] = []
    real = triton.jit
    monkeypatch.setattr(
        triton,
        "jit",
        lambda function, **options: calls.append((function.__name__, options)) or real(function, **options),
    )
    _, kernels, _ = modules
    placeholder = kernels.first_kernel
    assert isinstance(placeholder, PendingFunction)
    assert function_of(placeholder) is function_of(placeholder) is kernels.first_kernel
    assert sorted(calls, key=str) == [
        ("doubled", {}),
        ("first_kernel", {"do_not_specialize": ["n"]}),
        ("shifted", {}),
        ("twice_kernel", {}),
    ]


def test_threads_that_meet_at_the_first_launch(modules: tuple[ModuleType, ...]) -> None:
    """All threads get the same function, and none sees a helper that is still a placeholder."""
    helpers, kernels, _ = modules
    barrier, results = threading.Barrier(8), []

    def meet() -> None:
        barrier.wait()
        function = function_of(kernels.twice_kernel)
        results.append((function, pending(helpers), pending(kernels)))

    threads = [threading.Thread(target=meet) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(result == (kernels.twice_kernel, [], []) for result in results)
