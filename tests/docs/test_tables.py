"""The tables of operations and kernels, and the evidence behind them."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

import pytest

from gristmill.kernel_registry import grades as registered
from gristmill.kernel_registry.registry import default_registry

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


def test_every_letter_has_its_evidence() -> None:
    """Read from the files themselves: a bold letter ran (a report, a device test, or here), any other is in
    the compile matrix."""
    registry, checked = default_registry(), 0
    baseline = json.loads((ROOT / "ci" / "compile_baseline.json").read_text(encoding="utf-8"))
    built = {(key.partition("/")[0], key.partition("@")[2]) for key in baseline}
    ran = set()
    for path in (ROOT / "bench" / "results").glob("*/operations/*.json"):
        report = json.loads(path.read_text(encoding="utf-8"))
        ran |= {(row["kernel"], report["environment"]["target"]) for row in report["rows"] if row["us"]}
    ran |= {(kernel, where.partition(":")[0]) for kernel, of in grades.proved().items() for where, _ in of}
    for (op, heading), marks in _cells().items():
        for mark in marks:
            kernels = [
                k for k in registry.kernels_of(op) if tables.letter(k).strip("()") == mark.strip("*()")
            ]
            if not mark.startswith("**"):
                parts = [grades.CHAINS.get(k.name, (k.name,)) for k in kernels]
                hip = any(
                    k.language == "hip" and heading in k.requires.brings for k in kernels
                )  # test_hip_isa
                assert hip or any(all((part, heading) in built for part in names) for names in parts), (
                    op,
                    heading,
                    mark,
                )
            elif heading == "x86-64":
                assert any(k.language == "cpp" or k.provider == "torch" for k in kernels), (op, mark)
            else:
                assert any((k.name, heading) in ran or k.proven.startswith(f"{heading}:") for k in kernels), (
                    op,
                    mark,
                )
            checked += 1
    assert checked > 150


def test_columns_are_the_compile_matrix_and_the_cpu_of_the_tests() -> None:
    """Nothing was compiled for or run on sm_75, XPU or arm64, so the table has no such columns."""
    assert tuple(heading for heading, _ in tables.COLUMNS) == (*compile_matrix.TARGETS, "x86-64")
    for heading in ("sm_75", "xpu", "arm64", "gfx1030"):
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
    """Planted fault: a target leaves the baseline, a case of a kernel stops compiling, and reports and device
    tests are gone."""
    registry = default_registry()
    mark = registry.kernel("rms_norm", "rms_norm_triton")
    proofs = {(grade, arch) for grade, _, arch in grades.evidence(mark)}
    assert {("compiled", "sm_80"), ("interpreted", "sm_80"), ("elsewhere", "sm_90")} <= proofs
    assert not {arch for _, arch in proofs} & {"sm_75", "x86-64"}
    for name in ("linear_aiter", "linear_deepgemm"):
        assert not list(grades.evidence(registry.kernel("linear", name))), name
    remaining = dict(grades.compiled())
    remaining["rms_norm_triton"] -= {"sm_80"}
    for chain in ("moe_chain", "moe_chain_w", "moe_chain_invariant", "moe_chain_w_invariant"):
        remaining[f"{chain}_triton"] -= {"gfx942"}
    monkeypatch.setattr(grades, "compiled", lambda: remaining)
    for module in (tables, grades):
        monkeypatch.setattr(module, "reported", dict)
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


def test_a_pair_that_cannot_compile_is_no_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    baseline = tmp_path / "baseline.json"
    entries = {"a/one@sm_80": {"registers": 9}, "a/two@sm_80": {"cannot": "no such instruction"}}
    chain = {f"{part}/one@sm_80": {"registers": 9} for part in grades.CHAINS["moe_chain_triton"][1:]}
    baseline.write_text(json.dumps(entries | {"b/one@sm_80": {"registers": 9}} | chain))
    monkeypatch.setattr(grades, "BASELINE", baseline)
    compiled = grades.compiled.__wrapped__()
    assert compiled["a"] == frozenset() and compiled["b"] == {"sm_80"}
    assert compiled["moe_chain_triton"] == frozenset()  # one of its parts is missing


def test_the_files_of_the_records_exist() -> None:
    table = json.loads(registered.RECORDS.read_text(encoding="utf-8"))
    assert table.keys() == registered.GRADES.keys() - {"here"} | {registered.FAILED}
    assert all((ROOT / record).exists() for records in table.values() for record in records)


def test_chains_are_the_kernels_without_code_of_their_own() -> None:
    """Triton kernels without compile cases launch other kernels that have them; their launcher imports those."""
    registry = default_registry()
    kernels = {kernel.name: kernel for kernel in registry.all_kernels()}
    bare = {k.name for k in kernels.values() if k.language == "triton" and k.aot is None}
    assert bare == grades.CHAINS.keys()
    for chain, parts in grades.CHAINS.items():
        source = inspect.getsource(kernels[chain].load())
        for part in parts:
            assert kernels[part].aot is not None
            assert kernels[part].target.partition(":")[0].rpartition(".")[2] in source, (chain, part)


def test_every_kernel_is_on_the_page() -> None:
    text = tables.page(default_registry())
    for kernel in default_registry().all_kernels():
        assert f"| `{kernel.name}` |" in text
