"""README imports only from gristmill, other pages only from its packages; each use takes fewer than five
lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.py")),
]
IMPORT = re.compile(r"^(?:>>> |\.\.\. )?(?:from|import) (gristmill[\w.]*)", re.M)
USES = ("## Kernels alone", "## kernelbench", "## The runtime")


def too_deep(text: str, packages: bool) -> list[str]:
    """Returns imports of anything but gristmill itself or, with `packages`, anything but it, its packages and
    ``gristmill.ops``."""
    modules = [module for module in IMPORT.findall(text) if module != "gristmill"]
    if not packages:
        return modules
    folders = {module: ROOT.joinpath(*module.split(".")[1:], "__init__.py") for module in modules}
    return [module for module in modules if module != "gristmill.ops" and not folders[module].is_file()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_import_from_packages(page: Path) -> None:
    assert too_deep(page.read_text(encoding="utf-8"), page.name != "README.md") == []


def test_a_deeper_import_is_noticed() -> None:
    text = "```python\n>>> from gristmill.runtime.llm import LLM\nimport gristmill.ops as ops\n>>> import gristmill\n```"
    assert too_deep(text, packages=False) == ["gristmill.runtime.llm", "gristmill.ops"]
    assert too_deep(text, packages=True) == ["gristmill.runtime.llm"]
    assert too_deep("from gristmill.quant.formats import FormatError", packages=True) == []


@pytest.mark.parametrize("use", USES)
def test_each_use_takes_under_five_lines_and_one_import(use: str) -> None:
    """Checks the first Python block of each section; test_blocks runs it."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition(use)[2].partition("\n## ")[0]
    block = re.findall(r"```python\n(.*?)```", section, re.S)[0]
    lines = [line for line in block.splitlines() if line.startswith((">>> ", "... "))]
    assert [line for line in lines if "gristmill" in line and "import" in line] == [">>> import gristmill"]
    assert len(lines) < 5, lines
