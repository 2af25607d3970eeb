"""Programs of CuTe DSL: compiled once, found by later processes, checked against their placeholders; the registry's kernels compile."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gristmill.kernel_registry import closure
from gristmill.kernel_registry.kernel import load_attribute
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels import cutedsl
from tests.integrations.cutedsl.doubled import doubled

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "ci"))
import compile_matrix  # noqa: E402

CONFIG = {"arch": "sm_90a", "squared": False}
PAIRS = [pair for pair in compile_matrix.pairs(None, None) if pair.kernel.language == "cutedsl"]


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bool]]]:
    """What is compiled or found from now on, in an empty folder, by a process that has compiled nothing yet."""
    monkeypatch.setenv(cutedsl.FOLDER_VARIABLE, str(tmp_path / "programs"))
    monkeypatch.setattr(cutedsl, "_programs", {})
    events: list[tuple[str, bool]] = []
    monkeypatch.setattr(cutedsl, "listeners", [lambda name, hit: events.append((name, hit))])
    yield events


def test_a_program_is_compiled_once_and_found_later(heard: list[tuple[str, bool]]) -> None:
    first = cutedsl.program(doubled, CONFIG)
    assert cutedsl.program(doubled, dict(CONFIG)) is first and heard == [("doubled", False)]
    (file,) = cutedsl.folder().iterdir()
    assert file.name == cutedsl.file_name(doubled, CONFIG)
    cutedsl._programs.clear()  # as another process
    cutedsl.program(doubled, CONFIG)
    assert heard[1:] == [("doubled", True)]
    cutedsl.program(doubled, CONFIG | {"squared": True})
    assert heard[2:] == [("doubled", False)] and len([*cutedsl.folder().iterdir()]) == 2


def test_a_damaged_file_is_compiled_anew(heard: list[tuple[str, bool]]) -> None:
    cutedsl.program(doubled, CONFIG)
    (file,) = cutedsl.folder().iterdir()
    whole = file.stat().st_size
    file.write_bytes(file.read_bytes()[: whole // 3])
    cutedsl._programs.clear()
    cutedsl.program(doubled, CONFIG)
    assert heard == [("doubled", False)] * 2 and file.stat().st_size == whole


def test_a_folder_that_cannot_be_written(heard: list[tuple[str, bool]], tmp_path: Path) -> None:
    (tmp_path / "programs").write_text("a file")
    cutedsl.program(doubled, CONFIG)
    assert heard == [("doubled", False)]


@pytest.mark.parametrize("changed", ["configuration", "sources", "compiler"])
def test_what_the_name_of_a_file_depends_on(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, config = cutedsl.file_name(doubled, CONFIG), dict(CONFIG)
    if changed == "configuration":
        config["arch"] = "sm_100a"
    elif changed == "sources":
        sources = SimpleNamespace(code_hash=lambda *_: "another")
        monkeypatch.setattr(closure, "installed_sources", lambda: sources)
    else:
        monkeypatch.setattr(cutedsl, "_toolchain", lambda: "4.9")
    assert cutedsl.file_name(doubled, config) != before


def test_arguments_are_checked(heard: list[tuple[str, bool]]) -> None:
    run = cutedsl.program(doubled, CONFIG)
    x = torch.zeros(5)
    with pytest.raises(ValueError, match="device_type=cuda"):
        run(x, x)
    with pytest.raises((ValueError, TypeError), match=r"argument #0"):
        run(x.bfloat16(), x)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.key)
def test_the_kernels_compile_as_the_baseline_says(pair: compile_matrix.Pair) -> None:
    usage = compile_matrix.compile_one(pair.kernel.name, pair.kernel.op, pair.case, pair.target)
    baseline = compile_matrix.read_json(compile_matrix.BASELINE)
    assert pair.key in baseline and compile_matrix.judge(pair, usage, baseline[pair.key]) is None


def test_every_kernel_has_cases() -> None:
    kernels = {kernel for kernel in default_registry().all_kernels() if kernel.language == "cutedsl"}
    assert {kernel for kernel in kernels if kernel.aot} == {pair.kernel for pair in PAIRS}


def moved_registers(ptx: str) -> int:
    """Registers of a CTA after its warpgroups have exchanged them: one releases, the others ask for more."""
    (threads,) = (int(number) for number in re.findall(r"\.reqntid (\d+)", ptx))
    released, asked = (
        {int(number) for number in re.findall(rf"setmaxnreg\.{way}\.sync\.aligned\.u32\s+(\d+)", ptx)}
        for way in ("dec", "inc")
    )
    assert len(released) == len(asked) == 1
    return 128 * released.pop() + (threads - 128) * asked.pop()


@pytest.mark.parametrize(
    "pair", [pair for pair in PAIRS if pair.target == "sm_90"], ids=lambda pair: pair.key
)
def test_no_warpgroup_waits_for_registers_that_a_cta_lacks(pair: compile_matrix.Pair, tmp_path: Path) -> None:
    """setmaxnreg.inc would wait forever."""
    case = next(
        one
        for one in load_attribute(pair.kernel.aot or "")(Target.parse(pair.target))
        if one.name == pair.case
    )
    source = load_attribute(case.build)(case.config)
    cutedsl.compile_program(source, "sm_90a", "--keep-ptx", f"--dump-dir={tmp_path}")
    (ptx,) = (path.read_text() for path in tmp_path.glob("*.ptx"))
    assert 0 < moved_registers(ptx) <= 64 * 1024
