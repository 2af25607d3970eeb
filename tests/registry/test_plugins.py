"""Plugins that cannot be used are reported and change nothing else."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.plugins import Plugin, PluginFailure, load_plugins
from gristmill.kernel_registry.registry import Registry, default_registry, with_plugins
from tests import forked
from tests.registry import fakes

GOOD = """
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.requirement import Requirement

KERNEL = Kernel(op="rms_norm", name="rms_norm_good", provider="good", language="python", target="json:dumps",
                requires=Requirement())
"""
OPERATION = """
from gristmill.kernel_registry import Axis, Cost, Op, Scalar, Tensor, Tolerance

OP = Op(name="gm_op", family="good", summary="an operation", axes=(Axis("m", "int", "size", dynamic=True),
        Axis("x", "dtype", "dtype", default="fp32")), arguments=(Tensor('x', 'm'), Scalar('eps', 'float')),
        returns=(Tensor("out", "m"),), reference=lambda x, eps: x + eps, inputs=lambda *given: [], bucket="m",
        cost=lambda problem: Cost(0, 0), tolerance=lambda problem: Tolerance("exact", 0.0), examples=("m=1",), bench=())
"""
FAULTS = {
    "missing": ("import gm_no_such_module\n", "ModuleNotFoundError: No module named 'gm_no_such_module'"),
    "syntax": ("KERNEL = (\n", "SyntaxError"),
    "raises": ("raise RuntimeError('two\\nlines')\n", "RuntimeError: two lines"),
    "exits": ("import sys; sys.exit(3)\n", "SystemExit: 3"),
    "not_a_spec": ("KERNEL = 5\n", "expected an Op, Kernel or Layout, got int"),
    "not_a_list": ("KERNELS = 5\n", "TypeError: 'int' object is not iterable"),
    "taken": (
        GOOD.replace("rms_norm_good", "rms_norm_torch"),
        "kernel rms_norm_torch of rms_norm is registered twice",
    ),
    "no_op": (GOOD.replace('"rms_norm"', '"no_such_op"'), "has kernels of no_such_op: no such operation"),
    "no_launcher": (GOOD.replace("json:dumps", "json"), "target must be 'module:attr', got 'json'"),
    "bad_priority": (GOOD.replace("requires=", "priority='high', requires="), "priority an int"),
    "bad_version": (
        GOOD.replace("requires=Requirement()", "requires=Requirement(packages=(('torch', 'new'),))"),
        "package torch: 'new' is no version number",
    ),
    "bad_type": (
        OPERATION.replace("Scalar('eps', 'float')", "Scalar('eps', 'real')"),
        "ValueError: gm_op: eps must be one of int, float, bool, str, got 'real'",
    ),
    "bad_name": (OPERATION.replace("'eps'", "'e-s'"), "gm_op: 'e-s' is no name for an operation"),
    "bad_default": (
        OPERATION.replace("Scalar('eps', 'float')", "Scalar('eps', 'float', 'none')"),
        "gm_op: eps is float, and 'none' is no default for it",
    ),
    "bad_order": (
        OPERATION.replace("Tensor('x', 'm')", "Scalar('a', 'int', 1), Tensor('x', 'm')"),
        "an argument with a default stands before one without",
    ),
    "twice": (OPERATION.replace("'eps'", "'x'"), "gm_op: x: declared twice"),
    "reserved": (OPERATION.replace("'eps'", "'plan'"), "plan: no argument may have this name"),
    "bad_shape": (OPERATION.replace("'x', 'm'", "'x', 'm+'"), "gm_op: x has a size 'm+': invalid syntax"),
    "half": (
        GOOD + "KERNELS = (KERNEL,)\n",
        "kernel rms_norm_good of rms_norm is registered twice",
    ),  # the first of the two is not added either
}


def install(folder: Path, name: str, source: str, group: str = "gristmill.kernels") -> None:
    """Writes a distribution gm-<name> 1.0 into `folder`, with one module and one entry point for it."""
    (folder / f"gm_{name}.py").write_text(source)
    about = folder / f"gm_{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: gm-{name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{name} = gm_{name}\n")


def kernelbench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "COLUMNS": "240"}
    return forked.run("-m", "gristmill.bench.cli", *arguments, env=environment, path=(folder,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One good plugin and one per fault."""
    plugins = tmp_path_factory.mktemp("plugins")
    install(plugins, "good", GOOD)
    for name, (source, _) in FAULTS.items():
        install(plugins, name, source)
    return plugins


def test_list_gives_the_reason_of_each_fault_and_every_other_kernel(folder: Path) -> None:
    result = kernelbench(folder, "list", "--target", "cpu", "--json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    failed = {row["provider"]: row for row in rows if row["op"] is None}
    assert failed.keys() == {f"gm-{name} 1.0" for name in FAULTS}
    for name, (_, reason) in FAULTS.items():
        row = failed[f"gm-{name} 1.0"]
        (reason_given,) = row["reasons"]
        assert (
            reason_given.startswith(f"plugin {name} (gm_{name}, from gm-{name} 1.0): ")
            and reason in reason_given
        )
        assert "\n" not in reason_given and not row["available"] and row["kernel"] is None
    listed = [row["kernel"] for row in rows if row["op"] is not None]
    assert sorted(listed) == sorted([*(k.name for k in default_registry().all_kernels()), "rms_norm_good"])


def test_doctor_prints_one_line_for_each(folder: Path) -> None:
    output = json.loads(kernelbench(folder, "doctor", "--json").stdout)["failed_plugins"]
    assert {row["name"] for row in output} == FAULTS.keys()
    assert {tuple(row) for row in output} == {("group", "name", "module", "distribution", "reason")}
    result = kernelbench(folder, "doctor")
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if "failed plugin" in line]
    assert len(lines) == len(FAULTS)
    assert any("missing (gm_missing, from gm-missing 1.0): ModuleNotFoundError" in line for line in lines)


def test_operations_are_functions_beside_plugins_that_failed(folder: Path, tmp_path: Path) -> None:
    """gristmill.ops has every operation except those of plugins that failed, including one that only torch
    refuses."""
    install(tmp_path, "fine", OPERATION.replace("gm_op", "gm_fine"))
    install(tmp_path, "late", OPERATION.replace("gm_op", "gm_late").replace('"an operation"', '""'))
    code = (
        "import torch, gristmill; from gristmill.kernel_registry import default_registry as registry\n"
        "ops = gristmill.ops; x = torch.ones(3); print(ops.rms_norm(x[None], x, 0.0).sum().item())\n"
        "print(hasattr(ops, 'gm_fine'), hasattr(ops, 'gm_op'), hasattr(ops, 'gm_late'), 'gm_late' in registry().ops)\n"
        "print(*(failure for failure in registry().failures if failure.plugin.name == 'late'))\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    process = forked.run("-c", code, env=environment, path=(folder, tmp_path))
    assert process.returncode == 0, process.stderr
    total, present, late = process.stdout.splitlines()
    assert float(total) == 3.0 and present == "True False False False"
    assert late == "plugin late (gm_late, from gm-late 1.0): IndexError: string index out of range"


FAULTY = {
    "accepts": ("accepts=lambda problem: 1 / 0", "accepts raised ZeroDivisionError: division by zero"),
    "refuses": (
        "accepts=lambda problem: True",
        "accepts must return None or the reason why not, returned True",
    ),
    "config": ("config=lambda problem, target: {}['x']", "config raised KeyError: 'x'"),
    "shape": (
        "config=lambda problem, target: {'x': [1]}",
        "config must return names with numbers or text, returned {'x': [1]}",
    ),
    "estimate": (
        "estimate=lambda problem, target: '3'",
        "estimate must return microseconds or None, returned '3'",
    ),
    "sources": ("sources=lambda problem: 1 / 0", "sources raised ZeroDivisionError: division by zero"),
}
"""Functions of a kernel that fail when they are called -> what is told of them."""


@pytest.mark.parametrize("name", FAULTY)
def test_a_kernel_whose_functions_fail_is_refused_and_the_others_run(name: str, tmp_path: Path) -> None:
    given, reason = FAULTY[name]
    install(tmp_path, "faulty", GOOD.replace("requires=", f"priority=1000, {given}, requires="))
    code = (
        "import torch, gristmill; x = torch.ones(3, 8)\n"
        "print(gristmill.ops.rms_norm(x, x[0], 0.0).sum().item())\n"
        "for target in (None, 'h100'):\n"
        "    answer = gristmill.explain('rms_norm', 'm=3,n=8,x=fp32', target=target)\n"
        "    print(answer.selected, next(c for c in answer.candidates if c.kernel.name == 'rms_norm_good').verdict)\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    process = forked.run("-c", code, env=environment, path=(tmp_path,))
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == ["24.0", "rms_norm_cpu problem", "rms_norm_triton problem"]
    assert (
        f"kernel rms_norm_good of plugin faulty (gm_faulty, from gm-faulty 1.0): {reason}" in process.stderr
    )


def test_commands_name_a_kernel_whose_functions_fail_and_go_on(tmp_path: Path) -> None:
    install(tmp_path, "faulty", GOOD.replace("requires=", f"{FAULTY['config'][0]}, requires="))
    result = kernelbench(tmp_path, "bench", "rms_norm", "--problem", "m=1,n=8", "--json")
    assert result.returncode == 0, result.stderr
    reasons = {row["kernel"]: row["reason"] for row in json.loads(result.stdout)}
    assert FAULTY["config"][1] in reasons["rms_norm_good"] and not reasons["rms_norm_cpu"]


def test_without_plugins_there_is_nothing_to_report(tmp_path: Path) -> None:
    install(tmp_path, "good", GOOD)
    rows = json.loads(kernelbench(tmp_path, "list", "--json").stdout)
    assert all(row["op"] for row in rows) and "rms_norm_good" in {row["kernel"] for row in rows}
    assert json.loads(kernelbench(tmp_path, "doctor", "--json").stdout)["failed_plugins"] == []


def test_another_group_is_loaded_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "fine", "VALUE = 7\n", group="gristmill.test_group")
    install(tmp_path, "broken", "1 / 0\n", group="gristmill.test_group")
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded, failures = load_plugins("gristmill.test_group")
    assert [(plugin.name, module.VALUE) for plugin, module in loaded] == [("fine", 7)]
    plugin = Plugin("gristmill.test_group", "broken", "gm_broken", "gm-broken 1.0")
    assert failures == [PluginFailure(plugin, "ZeroDivisionError: division by zero")]


def plugin(name: str) -> Plugin:
    return Plugin("gristmill.kernels", name, name, f"{name} 1.0")


def test_a_plugin_may_use_an_operation_of_another_unless_that_one_failed() -> None:
    declares = (plugin("declares"), SimpleNamespace(OP=fakes.OP, __name__="declares"))
    uses = (plugin("uses"), SimpleNamespace(KERNEL=fakes.kernel("mix_one"), __name__="uses"))
    for order in ((declares, uses), (uses, declares)):
        extended = with_plugins(Registry(), order)
        assert [k.name for k in extended.kernels_of("mix")] == ["mix_one"] and not extended.failures
    broken = (plugin("declares"), SimpleNamespace(OP=fakes.OP, LAYOUTS=(3,), __name__="declares"))
    extended = with_plugins(Registry(), (broken, uses))
    assert not extended.ops and not extended.kernels
    assert [failure.plugin.name for failure in extended.failures] == ["declares", "uses"]
    assert extended.failures[1].reason == "has kernels of mix: no such operation"


def test_the_registry_that_is_extended_stays_as_it_was() -> None:
    registry = Registry()
    registry.add(fakes.OP)
    extra: Kernel = fakes.kernel("mix_extra")
    extended = with_plugins(registry, [(plugin("extra"), SimpleNamespace(KERNEL=extra, __name__="extra"))])
    assert extended.kernel("mix", "mix_extra").module == "extra" and not registry.kernels


def test_what_is_installed_later_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points are read once for each state of the folders."""
    read: list[str] = []
    real = importlib.metadata.entry_points
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda: (read.append("read"), real())[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a folder that gets a __pycache__ has changed too

    def found() -> list[str]:
        loaded, failures = load_plugins("gm.planted")
        assert not failures
        return [plugin.name for plugin, _ in loaded]

    assert (found(), found(), len(read)) == ([], [], 1)
    for count, name in enumerate(("one", "two"), 1):
        install(tmp_path, name, "", "gm.planted")
        importlib.invalidate_caches()
        assert found() == found() == ["one", "two"][:count] and len(read) == 1 + count
