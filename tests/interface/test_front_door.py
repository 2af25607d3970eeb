"""What `import gristmill` offers: names, a cheap import, and lazy packages."""

from __future__ import annotations

import gc
import inspect
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import gristmill
from gristmill._lazy import lazy_names, offered

PACKAGES = [
    "gristmill",
    *(f"gristmill.{name}" for name in ("kernel_registry", "quant", "kernels", "autotune", "runtime")),
]
PROMISED = {"LLM", "Engine", "SamplingParams", "Policy", "quantize", "QuantTensor", "ops", "explain"}


def fresh(code: str) -> str:
    """Returns what a new process prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout


def test_import_is_light() -> None:
    """The import loads neither torch nor numpy. It takes 50 ms of processor time or, on a busy machine, as
    little as a module of the standard library that takes about as long."""
    code = (
        "import time, sys; t = time.process_time(); import gristmill; ours = time.process_time() - t;"
        "t = time.process_time(); import asyncio; known = time.process_time() - t;"
        "dir(gristmill); print(ours, known, {'torch', 'numpy', 'triton', 'rich'} & set(sys.modules) or '-')"
    )
    runs = [fresh(code).split() for _ in range(5)]
    assert all(run[2] == "-" for run in runs)
    import_time, known = (min(float(run[place]) for run in runs) for place in (0, 1))
    assert import_time < 0.05 or import_time < known, (import_time, known)


@pytest.mark.parametrize(
    "package", ["gristmill.kernel_registry", "gristmill.quant", "gristmill.kernels", "gristmill.runtime"]
)
def test_packages_import_nothing_before_a_name_is_asked_for(package: str) -> None:
    assert (
        fresh(
            f"import sys, {package}; print({{'torch', 'numpy', 'triton'}} & set(sys.modules) or '-')"
        ).strip()
        == "-"
    )


def test_the_registrys_nouns_need_no_torch() -> None:
    code = "import sys; from gristmill.kernel_registry import *; print('torch' in sys.modules, Target.parse('h200').name)"
    assert fresh(code).split() == ["False", "sm_90"]
    assert (
        fresh(
            "import sys; from gristmill import Policy, Target, QuantScheme; print('torch' in sys.modules)"
        ).strip()
        == "False"
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_every_offered_name_is_there(package: str) -> None:
    module = import_module(package)
    assert dir(module) == module.__all__ and len(module.__all__) > 3
    for name in module.__all__:
        value = getattr(module, name)
        assert value is getattr(module, name)
        assert inspect.ismodule(value) or value.__doc__ or not callable(value), (
            f"{package}.{name} has no docstring"
        )


@pytest.mark.parametrize("package", PACKAGES)
def test_no_name_hides_a_module(package: str) -> None:
    """`from package import name` means one thing, whatever was imported before."""
    module = import_module(package)
    modules = {path.stem for path in Path(module.__path__[0]).glob("*.py")} | {
        path.parent.name for path in Path(module.__path__[0]).glob("*/__init__.py")
    }
    assert modules & set(module.__all__) == ({"nn", "ops"} if package == "gristmill" else set())


def test_the_promised_names_and_no_others() -> None:
    assert set(gristmill.__all__) >= PROMISED
    with pytest.raises(AttributeError, match="module 'gristmill' has no attribute 'quantise'"):
        gristmill.quantise  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError):
        exec("from gristmill.kernel_registry import Kernal")


def test_names_come_from_the_type_checking_block_alone() -> None:
    source = "from a import b\nif TYPE_CHECKING:\n    from p.m import X as X, y as y\nelse:\n    from p.n import Z\n"
    assert offered(source) == {"X": "p.m", "y": "p.m"}
    assert offered(source.replace("TYPE_CHECKING", "DEBUG")) == {}


def test_ops_of_another_name_are_explained() -> None:
    with pytest.raises(AttributeError, match="did you mean rms_norm"):
        gristmill.ops.rms_nrom  # noqa: B018


def test_the_engine_and_the_llm_take_the_same_arguments() -> None:
    assert inspect.signature(gristmill.LLM) == inspect.signature(gristmill.Engine)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_first_access_collects_no_garbage(
    enabled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector is off while a module is imported, also one that fails, and then as it was."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "gm_home.py").write_text("import gc\nCOLLECTS = gc.isenabled()\n")
    (tmp_path / "gm_broken.py").write_text("raise ImportError('broken')\n")
    package = tmp_path / "gm_front.py"
    package.write_text(
        "if TYPE_CHECKING:\n    from gm_home import COLLECTS\n    from gm_broken import NAME\n"
    )
    monkeypatch.setitem(sys.modules, "gm_front", ModuleType("gm_front"))
    get, _, names = lazy_names("gm_front", str(package))
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        assert get("COLLECTS") is False and gc.isenabled() is enabled
        with pytest.raises(ImportError, match="broken"):
            get("NAME")
        assert gc.isenabled() is enabled and names == ["COLLECTS", "NAME"]
    finally:
        (gc.enable if was else gc.disable)()
        sys.modules.pop("gm_home", None)
