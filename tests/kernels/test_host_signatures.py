"""The calls of our wrappers fit the functions of the projects that they wrap, as `ci/host_signatures.py` read them from their releases."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from gristmill.autotune.verify import kernel_arguments, run_guarded
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target

sys.path.insert(0, str(Path(__file__).parents[2] / "ci"))
import host_signatures  # noqa: E402

TABLE = json.loads((Path(__file__).parent / "host_signatures.json").read_text())
FUNCTIONS = {name: rows for project in TABLE.values() for name, rows in project["functions"].items()}
SERVED = {"aiter.gemm_a8w8": "v0.1.4", "aiter.ops.rmsnorm.rmsnorm2d_fwd": "v0.1.3"}
"""Releases from which our calls fit, where they are not the oldest that was read."""
Calls = dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]]


def signature(parameters: list[str]) -> inspect.Signature:
    """Of parameters as the table writes them: `name=` has a default, `*` and `**` as in a definition, names after `*` are keywords."""
    made, keyword = list[inspect.Parameter](), False
    for text in parameters:
        name = text.strip("*=")
        if text.startswith("**"):
            made.append(inspect.Parameter(name, inspect.Parameter.VAR_KEYWORD))
        elif text.startswith("*"):
            keyword = True
            if name:
                made.append(inspect.Parameter(name, inspect.Parameter.VAR_POSITIONAL))
        else:
            kind = inspect.Parameter.KEYWORD_ONLY if keyword else inspect.Parameter.POSITIONAL_OR_KEYWORD
            default = None if text.endswith("=") else inspect.Parameter.empty
            made.append(inspect.Parameter(name, kind, default=default))
    return inspect.Signature(made)


class Recorder:
    """Stands for a class of a project: records how it is made, planned and run."""

    def __init__(self, name: str, calls: Calls, *given: Any, **named: Any) -> None:
        self._name, self._calls = name, calls
        calls.setdefault(f"{name}.__init__", []).append((given, named))

    def plan(self, *given: Any, **named: Any) -> None:
        self._calls.setdefault(f"{self._name}.plan", []).append((given, named))

    def run(self, *given: Any, **named: Any) -> None:
        self._calls.setdefault(f"{self._name}.run", []).append((given, named))


def maker(name: str, calls: Calls) -> Callable[..., Any]:
    """What stands for a class, or for a function, of which the call ends here."""
    if name.endswith("Wrapper"):
        return lambda *given, **named: Recorder(name, calls, *given, **named)

    def function(*given: Any, **named: Any) -> None:
        calls.setdefault(name, []).append((given, named))
        raise StopIteration

    return function


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """The calls that our wrappers make of the functions in the table, by its names."""
    found: Calls = {}
    modules: dict[str, ModuleType] = {}
    for function in FUNCTIONS:
        name = function.rsplit(".", 1)[0] if "Wrapper." in function else function
        path, _, attribute = name.rpartition(".")
        parts = path.split(".")
        for length in range(1, len(parts) + 1):
            place = ".".join(parts[:length])
            module = modules.setdefault(place, ModuleType(place))
            monkeypatch.setitem(sys.modules, place, module)
            if length > 1:
                setattr(modules[".".join(parts[: length - 1])], parts[length - 1], module)
        setattr(modules[path], attribute, maker(name, found))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device=None: type("Stream", (), {"cuda_stream": 0})()
    )
    wrapped = [
        "gristmill.kernels.attention._flashinfer",
        "gristmill.kernels.norm.rms_norm_flashinfer",
        "gristmill.kernels.norm.rms_norm_aiter",
    ]
    for name in wrapped:
        monkeypatch.delitem(sys.modules, name, raising=False)
    registry = default_registry()
    for op, kernel, text in (
        ("linear", "linear_deepgemm", "m=7,n=192,k=256,w=fp8_block.fp8_g128,codes=true"),
        ("linear", "linear_aiter", "m=7,n=48,k=256,w=fp8_ch.fp8_token"),
        ("rms_norm", "rms_norm_aiter", "m=3,n=64,x=bf16"),
        ("rms_norm", "rms_norm_flashinfer", "m=3,n=64,x=bf16"),
        (
            "paged_attention",
            "paged_attention_flashinfer",
            "q_tokens=2,seqs=2,max_q=1,max_ctx=20,total_ctx=30,heads=8,kv_heads=2,lse=true",
        ),
        (
            "paged_attention",
            "paged_attention_flashinfer",
            "q_tokens=9,seqs=2,max_q=8,max_ctx=20,total_ctx=30,heads=8,kv_heads=2",
        ),
        (
            "mla_attention",
            "mla_attention_flashinfer",
            "q_tokens=2,seqs=2,max_q=1,max_ctx=20,total_ctx=30,heads=16",
        ),
    ):
        definition = registry.op(op)
        problem = definition.problem(text)
        entry = registry.kernel(op, kernel)
        config = entry.config(problem, Target.parse("gfx942" if "aiter" in kernel else "h200"))
        given = kernel_arguments(definition, entry, list(definition.inputs(problem, 0, "cpu")))
        with suppress(StopIteration):
            run_guarded(definition, entry, config, given)
    yield found
    for name in wrapped:
        sys.modules.pop(name, None)


def fits(parameters: list[str] | None, call: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    if parameters is None:
        return False
    try:
        signature(parameters).bind(*call[0], **call[1])
    except TypeError:
        return False
    return True


def test_calls_fit_every_release_that_is_served(calls: Calls) -> None:
    assert calls.keys() == FUNCTIONS.keys(), "every function of the table is called"
    for function, rows in FUNCTIONS.items():
        since = [row["since"] for row in rows]
        first = since.index(SERVED.get(function, since[0]))
        for call in calls[function]:
            for index, row in enumerate(rows):
                expected = index >= first
                assert fits(row["parameters"], call) == expected, (function, row["since"], call)


def test_other_parameters_are_seen(calls: Calls) -> None:
    ((given, named),) = calls["aiter.ops.rmsnorm.rmsnorm2d_fwd"]
    assert fits(["input", "weight", "epsilon"], (given, named))
    assert not fits(["input", "weight", "eps"], (given, named))
    assert not fits(["input", "weight", "epsilon", "out"], (given, named))
    assert fits(["*", "input=", "weight=", "epsilon="], ((), {"epsilon": 1.0}))
    assert not fits(["*", "input=", "weight=", "epsilon="], (given, named))


def test_parameters_are_read_from_sources() -> None:
    source = "class A:\n    def run(self, q, *, out=None, lse): ...\ndef run(x, y=1, *rest, **more): ...\n"
    assert host_signatures.of_python(source, "A.run") == ["q", "*", "out=", "lse"]
    assert host_signatures.of_python(source, "run") == ["x", "y=", "*rest", "**more"]
    assert host_signatures.of_python(source, "B.run") is None
    bound = 'm.def("new", &f, py::arg("a"), py::arg("c") = std::nullopt);\nm.attr("old") = m.attr("new");'
    assert host_signatures.of_pybind(bound, "old") == ["a", "c="] == host_signatures.of_pybind(bound, "new")
    assert host_signatures.of_pybind(bound, "none") is None
