"""Functions of gristmill.ops: signatures, help, the stub for type checkers, and the generated page."""

from __future__ import annotations

import fcntl
import importlib.util
import inspect
import os
import pydoc
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import gristmill
from gristmill.autotune.bound import BoundPlan
from gristmill.kernel_registry import default_registry

ROOT = Path(__file__).resolve().parents[2]
OPS = sorted(default_registry().ops)

PROGRAM = """\
import gristmill
import torch
from gristmill import ops
x = torch.zeros(2, 4)
y: torch.Tensor = ops.rms_norm(x, x, 1e-5)
weights, ids = ops.grouped_topk(x, top_k=2, scoring="sigmoid")
z: torch.Tensor = ops.linear(x, [x], bias=None, plan=ops.bind("linear", {"n": 4, "k": 4}, "cpu"), out=x)
ops.rms_norm(x, x)  # wrong: [call-arg]
ops.rms_norm(x, x, "1e-5")  # wrong: [arg-type]
ops.linear(x, x, bais=x)  # wrong: [call-arg]
one: torch.Tensor = ops.grouped_topk(x, 2)  # wrong: [assignment]
ops.reshape_and_cache(x, x, x, x, x, out=x)  # wrong: [call-arg]
ops.rms_nrom(x, x, 1e-5)  # wrong: [attr-defined]
gristmill.LLM("models/a", dtpye="half")  # wrong: [call-arg]
gristmill.explain("linear", 3)  # wrong: [arg-type]
gristmill.quantise(x, "int4_g128")  # wrong: [attr-defined]
"""


def _load():
    spec = importlib.util.spec_from_file_location("gristmill_ci_api", ROOT / "ci" / "api.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


api = _load()


@pytest.mark.parametrize("name", OPS)
def test_a_signature_says_what_the_operation_takes(name: str) -> None:
    op, signature = default_registry().op(name), inspect.signature(getattr(gristmill.ops, name))
    *arguments, last = [p.name for p in signature.parameters.values()]
    keywords = ["plan", "out"] if op.outputs else ["plan"]
    assert [*arguments, last] == [*(p.name for p in op.parameters), *keywords]
    for parameter in op.parameters:
        shown = signature.parameters[parameter.name]
        assert (shown.default is inspect.Parameter.empty) == (parameter.default is None)
        assert (shown.annotation == torch.Tensor) == (
            parameter.type.partition("(")[0] == "Tensor" and "?" not in parameter.type
        )
    assert signature.parameters["plan"].annotation == BoundPlan | None
    returned = {0: None, 1: torch.Tensor}.get(len(op.outputs), tuple[(torch.Tensor,) * len(op.outputs)])
    assert signature.return_annotation == returned


@pytest.mark.parametrize("name", OPS)
def test_help_shows_it(name: str) -> None:
    text = pydoc.plain(pydoc.render_doc(getattr(gristmill.ops, name)))
    first = inspect.cleandoc(default_registry().op(name).reference.__doc__ or "").splitlines()[0]
    assert f"{name}(" in text and first in text and "Raises:" in text and "in module gristmill.ops" in text


def test_calls_that_do_not_bind_say_what_is_taken() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(
        TypeError, match=r"rms_norm: missing a required argument: 'eps'.*Tensor x, Tensor weight, float eps"
    ):
        gristmill.ops.rms_norm(x, x[0])
    with pytest.raises(TypeError, match="rms_norm: got an unexpected keyword argument 'epsilon'"):
        gristmill.ops.rms_norm(x, x[0], 1e-5, epsilon=1e-5)
    with pytest.raises(TypeError, match="reshape_and_cache writes into its arguments and has no out"):
        gristmill.ops.reshape_and_cache(x, x, x, x, x, out=x)


def as_copied(faulty: str = "") -> str:
    """Returns the text of ops.py, of which one place is replaced by a fault."""
    text = (ROOT / "src" / "gristmill" / "ops.py").read_text(encoding="utf-8")
    assert not faulty or text.count(faulty) == 1
    return text.replace(faulty, "return 3") if faulty else text


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """What a type checker reports of three programs, in one run: code by line by name.

    It reads and writes the cache of `make lint`, as ci/lint.sh does: a new clone has none of its own, and to read torch takes 20 seconds.
    """
    folder = tmp_path_factory.mktemp("programs")
    programs = {
        "program": PROGRAM,
        "ops_copy": as_copied(),
        "ops_faulty": as_copied("return __all__"),
    }
    files = [folder / f"{name}.py" for name in programs]
    for file, text in zip(files, programs.values(), strict=True):
        file.write_text(text, encoding="utf-8")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gristmill")
    with ExitStack() as stack:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((cache / "mypy.lock").open("a"))
        except OSError:
            cache = folder
        else:
            fcntl.flock(lock, fcntl.LOCK_EX)
        options = ("--config-file", "pyproject.toml", "--cache-dir", str(cache / "mypy"))
        command = [sys.executable, "-m", "mypy", *options, *map(str, files)]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found: dict[str, dict[int, str]] = {name: {} for name in programs}
    for name, line, code in re.findall(r"(\w+)\.py:(\d+): error: .*(\[[\w-]+\])$", process.stdout, re.M):
        found[name][int(line)] = code
    count = sum(map(len, found.values()))
    assert f"Found {count} errors in 2 files (checked 3 source files)" in process.stdout, (
        process.stdout + process.stderr
    )
    return found


def test_a_type_checker_reports_wrong_calls_and_no_others(reported: dict[str, dict[int, str]]) -> None:
    expected = {
        number: line.rpartition("wrong: ")[2]
        for number, line in enumerate(PROGRAM.splitlines(), 1)
        if "# wrong" in line
    }
    assert reported["program"] == expected


def test_the_module_that_the_stub_hides_is_checked(reported: dict[str, dict[int, str]]) -> None:
    """A type checker reads ops.pyi instead of ops.py, so a copy of ops.py is checked under another name; it has no error, and a copy with a
    planted fault has one."""
    assert (len(reported["ops_copy"]), len(reported["ops_faulty"])) == (0, 1)


def test_sections_follow_where_a_name_is_defined() -> None:
    assert api.section(gristmill.QuantScheme) == "Quantized weights" != api.section(gristmill.Policy)
    assert api.section(gristmill.ErrorInfo) == "Runtime" and api.section(gristmill.PolicyError) == "Errors"


def test_the_page_has_every_name_with_its_signature() -> None:
    text = api.page()
    for name in gristmill.__all__:
        assert f"\n### {name}\n" in text
    for name in OPS:
        assert f"\n#### ops.{name}\n\n```\nops.{name}(" in text
    assert ":meth:" not in text and "<factory>" not in text and " object at 0x" not in text
