"""Requirements and builds: every refusal is a sentence that names what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gristmill.kernel_registry.build import Build, installed, read_manifest, version_key
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target

T = Target.parse
TRITON = Build.of({"torch": "2.13.0+cpu", "triton": "3.9.0"}, triton_backends=("cuda",), python="3.11.7")


def test_features() -> None:
    need = Requirement.any({"wgmma", "tma"}, {"mfma"})
    assert need.check_hardware(T("sm_90")) == () == need.check_hardware(T("gfx942"))
    assert need.check_hardware(T("sm_120")) == (
        "needs one of {tma, wgmma} or {mfma}; sm_120 lacks mfma, wgmma",
    )
    assert Requirement.any({"wgmma"}).check_hardware(T("sm_120")) == ("needs {wgmma}; sm_120 lacks wgmma",)
    assert Requirement(vendors=("cpu",)).check_hardware(T("sm_90")) == ("runs on cpu; sm_90 is nvidia",)
    assert Requirement.any({"tma"}).check_hardware(T("sm_90-tma"))


@pytest.mark.parametrize("target", ["sm_103", "sm_110", "sm_120", "sm_90", "gfx942", "cpu:avx2"])
def test_sm_100a_code_stays_on_sm_100(target: str) -> None:
    need = Requirement(code="cuda:sm_100a")
    assert need.check_hardware(T("sm_100")) == ()
    assert len(need.check_hardware(T(target))) == 1


def test_triton() -> None:
    need = Requirement(code="triton")
    assert need.check_build(T("sm_90"), TRITON) == ()
    assert "no backend hip" in need.check_build(T("gfx942"), TRITON)[0]
    assert "not installed" in need.check_build(T("sm_90"), Build.none())[0]
    assert "interpreter is off" in need.check_hardware(T("cpu:avx2"), TRITON)[0]
    on = Build.of({"triton": "3.9.0"}, triton_interpreter=True)
    assert need.check_hardware(T("cpu:avx2"), on) == () == need.check_build(T("cpu:avx2"), on)


def test_compiled_code() -> None:
    build = Build.of(cpu_levels=("base", "avx2", "avx512"), cuda_archs=("sm_90a",))
    assert Requirement(code="cpp").check_build(T("cpu:amx"), build) == ()
    assert Requirement(code="cpp:avx512").check_build(T("cpu:avx512"), build) == ()
    assert "no code for cpu:amx" in Requirement(code="cpp:amx").check_build(T("cpu:amx"), build)[0]
    assert "avx512" in Requirement(code="cpp:avx512").check_hardware(T("cpu:avx2"))[0]
    assert Requirement(code="cpp").check_hardware(T("sm_90"))
    neon = Build.of(cpu_levels=("neon",))
    assert (
        "no C++ level that runs on cpu:avx2; it has cpu:neon"
        in Requirement(code="cpp").check_build(T("cpu:avx2"), neon)[0]
    )
    assert Requirement(code="cuda").check_build(T("sm_90"), build) == ()
    assert "runs on sm_100; it has sm_90a" in Requirement(code="cuda").check_build(T("sm_100"), build)[0]
    assert Requirement(code="cuda:sm_90a").check_build(T("sm_90"), Build.none())


def test_native_code_that_launches_load() -> None:
    requires = Requirement(code="cutedsl:sm_100f", loads=("compute_89",))
    target, packages = Target.parse("sm_100"), {"nvidia-cutlass-dsl": "4.8"}
    assert not requires.check_build(target, Build.of(packages, cuda_archs=("compute_80", "compute_89")))
    (reason,) = requires.check_build(target, Build.of(packages, cuda_archs=("compute_80",)))
    assert reason == "this build has no code for compute_89; it has compute_80"
    (reason,) = requires.check_build(target, Build.of(packages, left_out=("compute_89",)))
    assert "not in this build: compute_89" in reason


def test_packages() -> None:
    need = Requirement(packages=(("torch", "2.11"), ("Flash_Infer", "")))
    assert need.check_build(T("sm_90"), TRITON) == ("package Flash_Infer is not installed",)
    assert Requirement(packages=(("torch", "2.13.1"),)).check_build(T("sm_90"), TRITON) == (
        "package torch is 2.13.0+cpu; 2.13.1 or newer is needed",
    )
    order = ["2.9", "2.10.0rc1", "2.10", "2.10.1", "2.11.0.dev3", "2.11.0+cu130"]
    assert [version_key(v) for v in order] == sorted({version_key(v) for v in order})
    assert version_key("2.10") == version_key("2.10.0")
    with pytest.raises(ValueError, match="no version"):
        version_key("new")
    with pytest.raises(ValueError, match="package torch: 'new' is no version number"):
        Requirement(packages=(("torch", "new"),))
    odd = Build.of({"torch": "unknown"})  # what an installed package says of itself
    assert need.check_build(T("cpu:avx2"), odd)[0] == "package torch is unknown; 2.11 or newer is needed"


def test_offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "gm_fake_provider"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "norm.py").write_text("LIMIT = 1\ndef rmsnorm(): ...\nif LIMIT:\n    def maybe(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    good, bad, maybe = (f"gm_fake_provider.norm:{n}" for n in ("rmsnorm", "other", "maybe"))
    need = Requirement(offers=(good,))
    assert "was not looked for" in need.check_build(T("sm_90"), Build.none())[0]
    build = Build.none().confirm([good, bad, maybe, "gm_fake_provider.x:y", "gm_absent:y"])
    assert need.check_build(T("sm_90"), build) == () and build.offers == {good}
    assert "offers no other" in (build.why_not_offer(bad) or "")
    assert "only an import" in (build.why_not_offer(maybe) or "")
    assert "no module gm_fake_provider.x" in (build.why_not_offer("gm_fake_provider.x:y") or "")
    assert "not installed" in (build.why_not_offer("gm_absent:y") or "")
    assert "RuntimeError: imported" in (build.confirm([maybe], importing=True).why_not_offer(maybe) or "")


def test_an_import_inside_try_is_taken_to_happen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So libraries import the functions of their compiled modules. One that fails is told by the kernel's verification."""
    (tmp_path / "gm_fake_trying.py").write_text(
        "try:\n    from json import (\n        dumps,\n    )\nexcept ImportError:\n    from json import loads\n"
        "if dumps:\n    from json import load\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    tried, instead, maybe = (f"gm_fake_trying:{name}" for name in ("dumps", "loads", "load"))
    build = Build.none().confirm([tried, instead, maybe])
    assert build.offers == {tried}
    for unsure in (instead, maybe):
        assert "only an import" in (build.why_not_offer(unsure) or "")


def test_one_of_several_offers_suffices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gm_fake_module.py").write_text("def found(): ...\nif found:\n    def maybe(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    there, maybe, gone = "gm_fake_module:found", "gm_fake_module:maybe", "gm_absent:found"
    first, last, neither, unsure = (
        " or ".join(names) for names in ((there, gone), (gone, there), (gone, "gm_gone:x"), (gone, maybe))
    )
    build = Build.none().confirm([first, last, neither, unsure])
    assert build.offers == {first, last}
    assert (
        build.why_not_offer(neither)
        == "module gm_absent is not installed and module gm_gone is not installed"
    )
    assert "only an import" in (build.why_not_offer(unsure) or "")
    assert build.confirm([unsure], importing=True).why_not_offer(unsure) is None
    assert Requirement(offers=(last,)).check_build(T("sm_90"), build) == ()
    with pytest.raises(ValueError, match="expected 'module:attr'"):
        Requirement(offers=("a:x or b",))


def test_build_json_probe_and_key(tmp_path: Path) -> None:
    for build in (Build.none(), TRITON, Build.probe().confirm(["json:dumps", "json:nope"])):
        assert Build.from_json(json.loads(json.dumps(build.to_json()))) == build and hash(build) is not None
    assert TRITON.key() == "py=3.11,torch=2.13.0+cpu,triton=3.9.0" and Build.none().key() == "none"
    assert Build.probe() is Build.probe()
    (tmp_path / "Flash_Infer.python-0.7.2.dist-info").mkdir()
    assert installed([str(tmp_path), str(tmp_path / "absent")]) == {"flash-infer-python": "0.7.2"}
    assert read_manifest(tmp_path) == {}
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="build gristmill again"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("code", ["rust", "triton:sm_90", "cutedsl"])
def test_bad_requirement(code: str) -> None:
    with pytest.raises(ValueError, match="code"):
        Requirement(code=code)
    with pytest.raises(TypeError, match="set of feature names"):
        Requirement.any("tma")
