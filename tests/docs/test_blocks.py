"""Code blocks of the documents run and print what they show."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.autotune import binding

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


@pytest.mark.usefixtures("no_plans")
@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.name)
def test_examples_of_a_page(page: Path, policy_file) -> None:
    policy_file()
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    source = "\n".join(block for block in blocks if ">>>" in block)
    test = doctest.DocTestParser().get_doctest(source, {}, page.name, str(page), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    report: list[str] = []
    runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)
    assert runner.tries > 0
