"""The committed tables of operations and kernels match the registry."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from pathlib import Path

import pytest

from gristmill.kernel_registry.registry import default_registry

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
import compile_matrix  # noqa: E402


def _load():
    spec = importlib.util.spec_from_file_location("gristmill_ci_tables", ROOT / "ci" / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = _load()


def test_the_page_is_what_the_registry_says() -> None:
    assert tables.PAGE.read_text(encoding="utf-8") == tables.page(default_registry()), (
        "run python ci/tables.py"
    )


def test_the_readme_holds_the_table() -> None:
    text = tables.README.read_text(encoding="utf-8")
    assert tables.BEGIN in text and tables.readme(default_registry(), text) == text, "run python ci/tables.py"


def test_the_table_sits_between_marks_and_leaves_the_rest() -> None:
    updated = tables.readme(
        default_registry(), f"# a\n\n{tables.BEGIN}\na stale table\n{tables.END}\nafter\n"
    )
    assert (
        updated.startswith("# a\n\n")
        and updated.endswith("\nafter\n")
        and "a stale table" not in updated
        and "`rms_norm`" in updated
    )
    assert tables.readme(default_registry(), updated) == updated
    with pytest.raises(ValueError, match="no <!-- /ops-table -->"):
        tables.readme(default_registry(), tables.BEGIN)


def _cells() -> dict[tuple[str, str], list[str]]:
    """Maps (operation, heading) to the letters in README's table, as printed."""
    text = tables.README.read_text(encoding="utf-8").partition(tables.BEGIN)[2].partition(tables.END)[0]
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
    for (op, heading), marks in _cells().items():
        for mark in marks:
            kernels = [
                k for k in registry.kernels_of(op) if tables.letter(k).strip("()") == mark.strip("*()")
            ]
            if not mark.startswith("**"):
                parts = [tables.CHAINS.get(k.name, (k.name,)) for k in kernels]
                assert any(all((part, heading) in built for part in names) for names in parts), (
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


def test_without_evidence_there_is_no_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a target leaves the baseline, a case of a kernel stops compiling, and reports and device
    tests are gone."""
    registry = default_registry()
    mark = registry.kernel("rms_norm", "rms_norm_triton")
    assert tables.evidence(mark, "sm_80") == "compiled" and tables.evidence(mark, "sm_90") == "run"
    assert tables.evidence(mark, "sm_75") == "" and tables.evidence(mark, "x86-64") == ""
    for name in ("linear_aiter", "linear_deepgemm"):
        kernel = registry.kernel("linear", name)
        assert not any(tables.evidence(kernel, heading) for heading, _ in tables.COLUMNS), name
    remaining = tables.compiled() - {("rms_norm_triton", "sm_80"), ("permute_triton", "gfx942")}
    monkeypatch.setattr(tables, "compiled", lambda: remaining)
    monkeypatch.setattr(tables, "reported", dict)
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
    baseline.write_text(json.dumps(entries | {"b/one@sm_80": {"registers": 9}}))
    monkeypatch.setattr(tables, "BASELINE", baseline)
    assert tables.compiled.__wrapped__() == {("b", "sm_80")}


def test_chains_are_the_kernels_without_code_of_their_own() -> None:
    """Triton kernels without compile cases launch other kernels that have them; their launcher imports those."""
    registry = default_registry()
    kernels = {kernel.name: kernel for kernel in registry.all_kernels()}
    bare = {k.name for k in kernels.values() if k.language == "triton" and k.aot is None}
    assert bare == tables.CHAINS.keys()
    for chain, parts in tables.CHAINS.items():
        source = inspect.getsource(kernels[chain].load())
        for part in parts:
            assert kernels[part].aot is not None
            assert kernels[part].target.partition(":")[0].rpartition(".")[2] in source, (chain, part)


def test_every_kernel_is_on_the_page() -> None:
    text = tables.page(default_registry())
    for kernel in default_registry().all_kernels():
        assert f"| `{kernel.name}` |" in text
