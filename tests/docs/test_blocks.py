"""Code blocks of the documents, and of the docstrings of modules, run and print what they show."""

from __future__ import annotations

import ast
import doctest
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.autotune import binding

sys.path.insert(0, str(Path(__file__).parents[2] / "ci"))

import repository  # noqa: E402

ROOT = Path(__file__).parents[2]
PAGES = [
    p
    for p in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if p.exists()
]
WITH_EXAMPLES = [page for page in PAGES if ">>>" in page.read_text(encoding="utf-8")]


@pytest.fixture
def no_plans() -> Iterator[None]:
    """Removes plans of other tests, which `ops.prepare` would prepare too."""
    stores = binding.PLANS, binding._AUTOMATIC
    plans, automatic = (dict(store) for store in stores)
    for store in stores:
        store.clear()
    yield
    binding.PLANS.update(plans)
    binding._AUTOMATIC.update(automatic)


def modules() -> Iterator[Path]:
    """The modules whose docstring has examples."""
    for folder in repository.LINKED:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if ">>>" in text and ">>>" in (ast.get_docstring(ast.parse(text)) or ""):
                yield path


def run(source: str, path: Path) -> None:
    """Runs examples, and compares what they print with what they show."""
    test = doctest.DocTestParser().get_doctest(source, {}, path.name, str(path), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    report: list[str] = []
    runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)
    assert runner.tries > 0


@pytest.mark.usefixtures("no_plans")
@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.name)
def test_examples_of_a_page(page: Path, policy_file) -> None:
    policy_file()
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    run("\n".join(block for block in blocks if ">>>" in block), page)


@pytest.mark.usefixtures("no_plans")
@pytest.mark.parametrize("path", [*modules()], ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_of_a_module(path: Path, policy_file) -> None:
    policy_file()
    run(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "", path)


def test_a_wrong_example_is_seen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Expected:"):
        run(">>> 1 + 1\n3\n", tmp_path / "a.md")


@pytest.mark.parametrize(("page", "words"), [("docs/architecture.md", 2000), ("README.md", 1499)])
def test_a_page_to_read_first_stays_short(page: str, words: int) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").split()) <= words
