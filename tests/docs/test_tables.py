"""The tables of operations and kernels, and the evidence behind them."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gristmill.kernel_registry import grades as registered
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
import compile_matrix  # noqa: E402
import grades  # noqa: E402
import tables  # noqa: E402


def _cells() -> dict[tuple[str, str], list[str]]:
    """Maps (operation, heading) to the letters in the page's first table, as printed."""
    text = tables.PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
    header, _, *rows = [
        line.strip("|").split("|") for line in text.strip().splitlines() if line.startswith("|")
    ]
    headings = [heading.strip() for heading in header[1:]]
    return {
        (row[0].strip(" `"), heading): [mark for mark in cell.split() if mark != "-"]
        for row in rows
        for heading, cell in zip(headings, row[1:], strict=True)
    }


def test_every_letter_has_its_record_and_shows_spills() -> None:
    """Read from the records and the baseline: a bold letter is of code that ran on this very level, any other of code that was
    compiled for it; one of which a case spills there is marked."""
    registry, checked, marked = default_registry(), 0, 0
    table = json.loads(registered.RECORDS.read_text(encoding="utf-8"))
    codes = {kernel.name: kernel.code_hash() for kernel in registry.all_kernels()}
    recorded: dict[tuple[str, str], set[str]] = {}
    for grade in ("elsewhere", "compiled"):
        for kernels in table[grade].values():
            for name, entry in kernels.items():
                if entry["code"] == codes[name]:
                    for level in entry["on"]:
                        recorded.setdefault((name, level), set()).add(grade)
    baseline = json.loads(grades.BASELINE.read_text(encoding="utf-8"))
    spilling = {
        (k.partition("/")[0], k.partition("@")[2]) for k, entry in baseline.items() if entry.get("spills")
    }
    spilling |= {(name, arch) for name, entry in grades.ptx().items() for arch in entry.get("spills", ())}
    levels = dict(tables.COLUMNS)
    for (op, heading), marks in _cells().items():
        for mark in marks:
            kernels = [k.name for k in registry.kernels_of(op) if tables.letter(k).strip("()") in mark]
            grade = "elsewhere" if mark.startswith("**") else "compiled"
            assert any(grade in recorded.get((name, levels[heading]), ()) for name in kernels), (
                op,
                heading,
                mark,
            )
            spills = any((part, heading) in spilling for name in kernels for part in grades.parts(name))
            assert mark.endswith(tables.SPILLS) == spills, (op, heading, mark)
            checked, marked = checked + 1, marked + spills
    assert checked > 150 and marked > 10


def test_columns_are_the_compile_matrix_and_the_cpu_of_the_tests() -> None:
    """Nothing was compiled for or run on XPU or arm64, so the table has no such columns."""
    assert tuple(heading for heading, _ in tables.COLUMNS) == (*compile_matrix.TARGETS, "x86-64")
    for heading in ("xpu", "arm64", "gfx1030"):
        assert heading not in tables.ops_table(default_registry())


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes the tables read what the present evidence gives."""

    def write() -> None:
        (tmp_path / "grades.json").write_text(grades.records(default_registry()))
        monkeypatch.setattr(registered, "RECORDS", tmp_path / "grades.json")
        registered._recorded.cache_clear()

    yield write
    monkeypatch.undo()
    registered._recorded.cache_clear()


def test_without_evidence_there_is_no_letter(monkeypatch: pytest.MonkeyPatch, recorded) -> None:
    """Planted fault: a target leaves the baseline, a case of a kernel stops compiling, and reports are gone."""
    registry = default_registry()
    mark = registry.kernel("rms_norm", "rms_norm_triton")
    proofs = {(one.grade, level) for one in grades.evidence(mark) for level in one.levels}
    assert {("compiled", "sm_80"), ("interpreted", "sm_80")} <= proofs
    ran = [
        one
        for kernel in registry.all_kernels()
        for one in grades.evidence(kernel)
        if one.grade == "elsewhere"
    ]
    assert any("sm_90" in one.levels for one in ran), "reports are there, for now"
    assert not {level for _, level in proofs} & {"sm_70", "cpu:avx2"}
    for name in ("linear_aiter", "linear_humming"):
        assert not any(one.levels for one in grades.evidence(registry.kernel("linear", name))), name
    remaining = dict(grades.compiled())
    remaining["rms_norm_triton"] -= {"sm_80"}
    for chain in (
        "moe_chain",
        "moe_chain_w",
        "moe_chain_invariant",
        "moe_chain_w_invariant",
        "moe_few_tokens",
    ):
        remaining[f"{chain}_triton"] -= {"gfx942"}
    monkeypatch.setattr(grades, "compiled", lambda: remaining)
    monkeypatch.setattr(grades, "_judged", tuple)
    recorded()
    table = tables.ops_table(registry)
    rows = {
        line.split("|")[1].strip(" `"): line.split("|")[2:-1]
        for line in table.splitlines()
        if line.startswith("| `")
    }
    headings = [heading for heading, _ in tables.COLUMNS]
    assert rows["rms_norm"][headings.index("sm_80")].strip() == "-"
    # Compiled, but no longer shown to run.
    assert rows["rms_norm"][headings.index("sm_90")].strip() == "T"
    assert rows["moe"][headings.index("gfx942")].strip() == "-"  # a part of the chain is missing
    assert rows["moe"][headings.index("gfx950")].strip() == "T"


def test_ptx_that_ran_on_a_newer_gpu_counts_for_older_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel that is this PTX alone: not of one that launches Triton's too, nor of a cubin, nor of Triton's own code."""
    registry, hopper = default_registry(), Target.parse("h100")
    decode, gguf = (registry.kernel("linear", f"linear_{name}_decode_sm80") for name in ("w4a16", "gguf"))
    others = [
        registry.kernel(op, name)
        for op, name in (
            ("moe", "moe_sm80"),
            ("linear", "linear_w4a16_decode_sm90"),
            ("rms_norm", "rms_norm_triton"),
        )
    ]
    found = [grades.Judged("proven", k.name, hopper, "NVIDIA H100", "proof.json") for k in (decode, *others)]
    found.append(grades.Judged("outdated", gguf.name, hopper, "NVIDIA H100", "proof.json"))
    monkeypatch.setattr(grades, "_judged", lambda: tuple(found))
    table = json.loads(grades.records(registry))
    assert table["newer"]["proof.json"] == {
        decode.name: {
            "code": decode.code_hash(),
            "on": ["sm_80", "sm_86", "sm_87", "sm_89"],  # not sm_75, which it does not run on, nor sm_100
            "ran": "compute_80 on sm_90",
        }
    }
    assert table["elsewhere"]["proof.json"].keys() == {decode.name, *(kernel.name for kernel in others)}


def test_a_pair_that_cannot_compile_is_no_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    baseline = tmp_path / "baseline.json"
    entries = {"a/one@sm_80": {"registers": 9}, "a/two@sm_80": {"cannot": "no such instruction"}}
    chain = {f"{part}/one@sm_80": {"registers": 9} for part in grades.CHAINS["moe_chain_triton"][1:]}
    baseline.write_text(json.dumps(entries | {"b/one@sm_80": {"registers": 9}} | chain))
    monkeypatch.setattr(grades, "BASELINE", baseline)
    monkeypatch.setattr(grades, "baseline", grades.baseline.__wrapped__)
    compiled = grades.compiled.__wrapped__()
    assert compiled["a"] == frozenset() and compiled["b"] == {"sm_80"}
    assert compiled["moe_chain_triton"] == frozenset()  # one of its parts is missing


def test_the_worst_case_of_a_kernel_and_of_the_parts_of_a_chain_counts_as_spilling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = tmp_path / "baseline.json"
    sizes = {"a/one": 0, "a/two": 64, "a/three": 8, "permute_triton/one": 0, "combine_triton/one": 24}
    baseline.write_text(json.dumps({f"{case}@sm_80": {"spills": size} for case, size in sizes.items()}))
    monkeypatch.setattr(grades, "BASELINE", baseline)
    monkeypatch.setattr(grades, "baseline", grades.baseline.__wrapped__)
    assert grades.spilled("a", "sm_80") == 64 and grades.spilled("a", "sm_90") == 0
    assert grades.spilled("moe_chain_triton", "sm_80") == 24


def test_the_files_of_the_records_exist() -> None:
    table = json.loads(registered.RECORDS.read_text(encoding="utf-8"))
    assert table.keys() == registered.GRADES.keys() - {"here"} | {registered.FAILED}
    assert all((ROOT / record).exists() for records in table.values() for record in records)


def test_chains_are_the_kernels_without_code_of_their_own() -> None:
    """Triton kernels without compile cases launch other kernels that have them; their launcher imports those."""
    registry = default_registry()
    kernels = {kernel.name: kernel for kernel in registry.all_kernels()}
    bare = {k.name for k in kernels.values() if k.language == "triton" and k.aot is None}
    assert bare == {name for name in grades.CHAINS if kernels[name].language == "triton"}
    for chain, parts in grades.CHAINS.items():
        launcher: Any = kernels[chain].load()
        source = inspect.getsource(launcher)
        for name, module in launcher.__globals__.items():
            if inspect.ismodule(module) and f"{name}.run(" in source:  # a chain that several share
                source += inspect.getsource(module)
        for part in (part for part in parts if part != chain):
            assert kernels[part].aot is not None or part in grades.ptx()
            assert any(name in source for name in _own_modules(kernels[part])), (chain, part)


def _own_modules(kernel: Kernel) -> set[str]:
    """The names of the module of its launcher, and of those of the same folder that the launcher calls."""
    launcher: Any = kernel.load()
    folder, _, name = launcher.__module__.rpartition(".")
    source = inspect.getsource(launcher)
    others = ((name, module) for name, module in launcher.__globals__.items() if inspect.ismodule(module))
    return {name} | {name for name, module in others if module.__package__ == folder and f"{name}." in source}


def test_every_kernel_is_on_the_page() -> None:
    text = tables.page(default_registry())
    for kernel in default_registry().all_kernels():
        assert f"| `{kernel.name}` |" in text
