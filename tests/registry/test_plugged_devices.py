"""Devices of other makers: the plugin of docs/devices.md, installed and used; plugins that cannot be used change nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.autotune.device import device_target, torch_name
from gristmill.bench import proofs
from gristmill.kernel_registry import ArchFacts, Policy, Requirement, Target, Vendor
from gristmill.kernel_registry.plugins import Plugin
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.targets import plugged as module
from gristmill.kernel_registry.targets.plugged import Plugged, plugged
from gristmill.kernel_registry.targets.probe import probe_devices
from tests import forked

PAGE = Path(__file__).resolve().parents[2] / "docs" / "devices.md"
T1 = ArchFacts("acme:t1", "acme", "t1", frozenset({"acme:rows"}), "Acme T1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin of the page, installed with its entry points."""
    installed = tmp_path_factory.mktemp("acme")
    source, groups = re.findall(r"```(?:python|toml)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (installed / "gm_acme.py").write_text(source)
    about = installed / "gm_acme-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: gm-acme\nVersion: 1.0\n")
    named = re.sub(r'\[project\.entry-points\."(.*)"\]', r"[\1]", groups).replace('"', "")
    (about / "entry_points.txt").write_text(named)
    return installed


def kernelbench(folder: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "COLUMNS": "240"}
    environment.pop("TRITON_INTERPRET", None)
    process = forked.run(
        "-m", "gristmill.bench.cli", *arguments, env=environment, path=(folder,), workers=True
    )
    assert process.returncode == status, process.stderr
    return process


def test_doctor_shows_the_device(folder: Path) -> None:
    report = json.loads(kernelbench(folder, "doctor", "--json").stdout)
    device = next(one for one in report["devices"] if one["vendor"] == "acme")
    assert device["target"] == "acme:t1" and device["device"] == "Acme T1 rev 2"
    assert device["features"] == ["acme:rows", "bf16.native"] and report["failed_plugins"] == []
    assert device["measured"] is None


def test_every_operation_runs_there_and_its_own_kernel_comes_first(folder: Path) -> None:
    rows = json.loads(kernelbench(folder, "list", "--target", "acme:t1", "--json").stdout)
    there = {row["kernel"]: row for row in rows}
    assert there["rms_norm_acme"]["available"] and there["rms_norm_torch"]["available"]
    assert there["rms_norm_triton"]["reasons"] == ["Triton emits no code for acme:t1"]
    assert there["rms_norm_cpu"]["reasons"] == ["runs on cpu; acme:t1 is acme"]
    assert {row["op"] for row in rows if row["available"]} == default_registry().ops.keys()
    here = {
        row["kernel"]: row
        for row in json.loads(kernelbench(folder, "list", "--target", "cpu", "--json").stdout)
    }
    assert here["rms_norm_acme"]["reasons"][0].startswith("runs on acme; cpu:")
    output = kernelbench(
        folder, "explain", "rms_norm", "--problem", "m=4,n=64", "--target", "acme:t1", "--json"
    )
    explained = json.loads(output.stdout)
    assert explained["selected"] == "rms_norm_acme"
    verdicts = {row["kernel"]: row["verdict"] for row in explained["candidates"]}
    assert verdicts["rms_norm_acme"] == "selected" and verdicts["rms_norm_cpu"] == "hardware"


def test_its_kernels_can_be_proven_and_times_are_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    kernelbench(folder, "prove", "--target", "acme:t1", "--op", "rms_norm", "--out", str(path))
    report = json.loads(path.read_text())
    assert report["environment"]["target"] == "acme:t1" and report["digest"] == proofs.digest(report)
    assert {row["kernel"] for row in report["rows"]} == {"rms_norm_acme", "rms_norm_torch"}
    refused = kernelbench(folder, "bench", "rms_norm", "--target", "acme:t1", status=2)
    assert "acme:t1 is a device of a plugin" in refused.stderr


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """Modules by the names of their plugins, as `plugged` finds them."""
    modules: dict[str, object] = {}

    def load(group: str) -> tuple[list[tuple[Plugin, object]], list[object]]:
        assert group == "gristmill.targets"
        return [(Plugin(group, name, name, f"{name} 1.0"), value) for name, value in modules.items()], []

    monkeypatch.setattr(module, "load_plugins", load)
    plugged.cache_clear()
    yield modules
    monkeypatch.undo()
    plugged.cache_clear()


class Declared:
    def __init__(self, vendor: object) -> None:
        self.VENDOR = vendor


def vendor(name: str = "acme", torch: str = "npu", facts: ArchFacts = T1, probe: object = list) -> Vendor:
    return Vendor(name, torch, (facts,), probe)  # type: ignore[arg-type]


def test_targets_requirements_and_torch_names(declared: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="unknown target 'acme:t1'"):
        Target.parse("acme:t1")
    with pytest.raises(ValueError, match="vendor 'acme' is unknown"):
        Requirement(vendors=("acme",))
    declared["acme"] = Declared(vendor(probe=lambda: [Target.parse("acme:t1")] * 2))
    plugged.cache_clear()
    target = Target.parse("acme:t1")
    needs = Requirement.any({"acme:rows"}, vendors=("acme",))
    assert needs.check_hardware(target) == () and target.triton_target is None
    assert needs.check_hardware(Target.parse("sm_90"))[0] == "runs on acme; sm_90 is nvidia"
    assert [one for one in probe_devices().targets if one.vendor == "acme"] == [target, target]
    assert torch_name("acme", 1) == "npu:1" and torch_name("nvidia", 0) == "cuda:0"
    with pytest.raises(ValueError, match="unknown target 'acme:t2'; near: acme:t1"):
        Target.parse("acme:t2")
    with pytest.raises(ValueError, match="expected cpu, cuda, xpu, npu, or one of these"):
        device_target("tpu:0", Policy())


FAULTS = {
    "nothing": (None, "TypeError: VENDOR must be a Vendor, got NoneType"),
    "a taken name": (vendor("cpu"), "vendor 'cpu': expected a name in lower case that is not taken"),
    "upper case": (vendor("Acme"), "vendor 'Acme': expected a name in lower case"),
    "a taken device": (
        vendor(torch="cuda"),
        "torch 'cuda': expected a type of torch devices that is not taken",
    ),
    "an index": (vendor(torch="npu:0"), "torch 'npu:0': expected a type"),
    "another vendor": (
        vendor("other"),
        "an architecture is 'acme:t1' of 'acme'; expected other:NAME of other",
    ),
    "no architectures": (
        Vendor("acme", "npu", (), list),
        "expected architectures, and a function that probes",
    ),
    "no probe": (vendor(probe=3), "expected architectures, and a function that probes"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_vendor_that_cannot_be_used_is_a_failure_and_nothing_else(
    name: str, declared: dict[str, object]
) -> None:
    declared["broken"] = Declared(FAULTS[name][0])
    declared["good"] = Declared(vendor("good", "mps", ArchFacts("good:g1", "good", "g1", frozenset(), "G1")))
    found: Plugged = plugged()
    (failure,) = found.failures
    assert FAULTS[name][1] in str(failure) and str(failure).startswith(
        "plugin broken (broken, from broken 1.0)"
    )
    assert [*found.vendors] == ["good"] and Target.parse("good:g1").vendor == "good"


def test_two_plugins_with_one_name(declared: dict[str, object]) -> None:
    declared["one"] = declared["two"] = Declared(vendor())
    assert [*plugged().vendors] == ["acme"] and [f.plugin.name for f in plugged().failures] == ["two"]


def test_a_probe_that_fails_is_a_reason(declared: dict[str, object]) -> None:
    def broken() -> list[Target]:
        raise OSError("no driver")

    declared["acme"] = Declared(vendor(probe=broken))
    declared["other"] = Declared(
        vendor(
            "other",
            "mps",
            ArchFacts("other:o", "other", "o", frozenset(), "O"),
            lambda: [Target.parse("sm_90")],
        )
    )
    probed = probe_devices()
    assert not [one for one in probed.targets if one.vendor in ("acme", "other")]
    assert "no acme device here (OSError: no driver)" in probed.reasons
    assert any(
        reason.startswith("no other device here (TypeError: expected targets") for reason in probed.reasons
    )


def test_features_outside_the_vocabulary_belong_to_their_vendor() -> None:
    for feature in ("rows", "other:rows"):
        with pytest.raises(ValueError, match=f"features not in the vocabulary: {feature}"):
            ArchFacts("acme:t1", "acme", "t1", frozenset({feature}), "Acme T1")
