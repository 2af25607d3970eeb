"""Wrapped libraries whose source does not show what they offer are imported when their kernels are measured."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gristmill.autotune.place import imported, place
from gristmill.bench.peers import PEERS, unwrapped
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.requirement import Requirement
from tests import ceilings, forked

KERNELS = """
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.requirement import Requirement

def launch(config, call):
    import gm_lazy
    gm_lazy.Wrapper().plan(call.x, call.weight, call.eps, call.out)

KERNEL = Kernel(op="rms_norm", name="rms_norm_lazy", provider="gm_lazy", language="python", target=f"{__name__}:launch",
                requires=Requirement(offers=("gm_lazy:Wrapper.plan",)))
"""
LIBRARY = """
class Wrapper:
    def plan(self, x, weight, eps, out):
        v = x.float()
        out.copy_(v * (v.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float())
"""


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    """A folder with a library, and a distribution that registers a kernel which wraps it."""
    (tmp_path / "gm_peer.py").write_text(KERNELS)
    (tmp_path / "gm_lazy.py").write_text(LIBRARY)
    about = tmp_path / "gm_peer-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: gm-peer\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[gristmill.kernels]\npeer = gm_peer\n")
    return tmp_path


def ask(folder: Path, *arguments: str) -> list[dict]:
    policy = folder / "policy.toml"
    policy.write_text(f'cache = "{folder}"\n')
    ceilings.keep(folder)  # to measure them takes seconds
    process = forked.run(
        *("-m", "gristmill.bench.cli", *arguments, "--target", "cpu", "--json"),
        env={**os.environ, "GRISTMILL_POLICY": str(policy)},
        path=(folder,),
        workers=True,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


PROBLEM = ("--problem", "m=4,n=256")


@pytest.mark.parametrize(
    "kernels", [("--kernels", "*_lazy"), ("--kernels", "rms_norm_lazy,rms_norm_cpu"), ()]
)
def test_bench_imports_what_it_is_to_time(peer: Path, kernels: tuple[str, ...]) -> None:
    rows = {
        row["kernel"]: row
        for row in ask(peer, "bench", "rms_norm", *PROBLEM, *kernels, "--quick", "--seconds", "0.02")
    }
    assert rows["rms_norm_lazy"]["us"] > 0 and rows["rms_norm_lazy"]["reason"] == ""


def test_compare_and_verify_import_too(peer: Path) -> None:
    (row,) = ask(
        peer,
        "compare",
        "rms_norm",
        *PROBLEM,
        "--kernels",
        "rms_norm_cpu",
        "--baseline",
        "*_lazy",
        "--seconds",
        "0.5",
    )
    assert row["verdict"] not in ("GAP", "WRONG") and row["baseline"] == "rms_norm_lazy"
    rows = ask(peer, "verify", "--kernel", "rms_norm_lazy")
    assert rows and all(row["ok"] for row in rows)


def test_lists_import_nothing(peer: Path) -> None:
    rows = {row["kernel"]: row for row in ask(peer, "list", "--op", "rms_norm")}
    assert "only an import can tell" in str(rows["rms_norm_lazy"])


def test_a_library_that_lacks_it_after_all_is_a_named_gap(peer: Path) -> None:
    (peer / "gm_lazy.py").write_text("class Wrapper: pass\n")
    (row,) = ask(peer, "bench", "rms_norm", *PROBLEM, "--kernels", "*_lazy", "--quick", "--seconds", "0.02")
    assert row["us"] is None and "has no attribute 'plan'" in row["reason"]


def test_a_library_that_replaces_a_timer_when_imported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    monkeypatch.setattr(time, "perf_counter", time.perf_counter)  # restored afterwards
    (tmp_path / "gm_slow_clock.py").write_text(
        "import time\ntime.perf_counter = lambda: 0.0\nclass Wrapper:\n    def plan(self): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    kernel = Kernel(
        op="rms_norm",
        name="slow_clock",
        provider="test",
        language="python",
        target="json:dumps",
        requires=Requirement(offers=("gm_slow_clock:Wrapper.plan",)),
    )
    with pytest.raises(RuntimeError, match="slow_clock need replaced time.perf_counter"):
        imported(place("cpu"), [kernel])


def test_libraries_that_nothing_wraps_are_gaps_by_name(peer: Path) -> None:
    (peer / "torchao-0.9.dist-info").mkdir()
    problem = ("linear", "--problem", "m=1,n=64,k=128,w=int4_g128")
    rows = {row["kernel"]: row for row in ask(peer, "bench", *problem, "--quick", "--seconds", "0.02")}
    assert (
        rows["torchao"]["us"] is None
        and rows["torchao"]["reason"] == "no kernel here, and torchao 0.9 is installed"
    )
    rows = {row["kernel"]: row for row in ask(peer, "compare", *problem, "--seconds", "0.3")}
    assert rows["torchao"]["verdict"] == "GAP" and "no kernel here" in rows["torchao"]["reason"]
    named = ask(peer, "bench", *problem, "--kernels", "linear_cpu", "--quick", "--seconds", "0.02")
    assert [row["kernel"] for row in named] == ["linear_cpu"]  # named kernels are taken as they are


def test_peers_are_of_a_device_and_of_an_operation() -> None:
    registry, cpu, h200 = default_registry(), place("cpu"), place("h200")
    assert {"gemlite", "torchao"} <= unwrapped(
        registry.op("linear"), h200
    ).keys() and "gemlite" not in unwrapped(registry.op("linear"), cpu)
    assert "flashinfer" in unwrapped(registry.op("sample"), h200) and not unwrapped(
        registry.op("sample"), cpu
    )
    for op in registry.ops.values():  # a library is either a candidate or a gap of an operation, never both
        assert not unwrapped(op, h200).keys() & {kernel.provider for kernel in registry.kernels_of(op.name)}
    assert all(name in registry.ops for one in PEERS for name in one.ops)
