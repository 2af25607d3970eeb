"""The committed tables of operations and kernels are what the registry says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target

ROOT = Path(__file__).resolve().parents[2]


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
    made = tables.readme(default_registry(), f"# a\n\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    assert (
        made.startswith("# a\n\n")
        and made.endswith("\nafter\n")
        and "old" not in made
        and "`rms_norm`" in made
    )
    assert tables.readme(default_registry(), made) == made
    with pytest.raises(ValueError, match="no <!-- /ops-table -->"):
        tables.readme(default_registry(), tables.BEGIN)


def test_columns_speak_for_the_targets_that_the_legend_names() -> None:
    """Targets said to be like another one are served by the same kernels."""
    alike = {"sm_80": ("sm_86", "sm_87", "sm_89"), "sm_100": ("sm_103",), "sm_120": ("sm_121",)}
    for column, others in alike.items():
        for kernel in default_registry().all_kernels():
            for other in others:
                assert tables.serves(kernel, Target.parse(column)) == tables.serves(
                    kernel, Target.parse(other)
                ), kernel.name


def test_every_kernel_is_on_the_page_and_serves_some_column() -> None:
    text = tables.page(default_registry())
    for kernel in default_registry().all_kernels():
        assert f"| `{kernel.name}` |" in text
        assert any(tables.serves(kernel, Target.parse(target)) for _, target in tables.COLUMNS), kernel.name
