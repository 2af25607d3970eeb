"""Links of the pages lead to files and headings that exist."""

from __future__ import annotations

import sys
import urllib.error
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
import check_links  # noqa: E402


@pytest.mark.parametrize("page", check_links.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_exist(page: Path) -> None:
    assert check_links.broken(page) == []


def test_broken_links_are_seen(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text(
        '# A *title*, with `code`: (1)\n\n## Twice\n\n## Twice\n<a id="here"></a>\n'
    )
    page = tmp_path / "a.md"
    page.write_text(
        "# Own\n[1](b.md#a-title-with-code-1) [2](b.md#twice-1) [3](#own) [4](b.md#here) [5](https://example.org/x) "
        "`[6](code.md)`\n```\n[7](block.md)\n```\n[8](c.md) [9](b.md#twice-2) [10](#other)\n"
        '<img alt="" src="d.svg">\n'
    )
    assert check_links.broken(page) == [
        "a.md links to c.md: no such file",
        "a.md links to b.md#twice-2: no such heading",
        "a.md links to #other: no such heading",
        "a.md links to d.svg: no such file",
    ]


@pytest.mark.parametrize(
    ("answer", "why"), [(None, ""), (404, "u: 404"), (403, ""), (OSError("no route"), "u: no route")]
)
def test_other_sites(answer: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that refuses programs is no broken link; one that does not answer three times is."""
    monkeypatch.setattr(check_links.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(check_links.urllib.request, "Request", lambda url, headers: url)
    asked: list[str] = []

    def open_url(request: str, timeout: float) -> None:
        asked.append(request)
        if isinstance(answer, int):
            raise urllib.error.HTTPError(request, answer, "", {}, None)  # type: ignore[arg-type]
        if answer is not None:
            raise answer

    assert check_links.unreachable("u", open_url) == why
    assert len(asked) == (3 if isinstance(answer, OSError) else 1)
