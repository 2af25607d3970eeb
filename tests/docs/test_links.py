"""Links of the pages lead to files and headings that exist, and paths that the architecture names are there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")


def pages() -> list[Path]:
    """The Markdown files of the repository."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def prose(text: str) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", text, flags=re.S))


def links(text: str) -> Iterator[str]:
    """The targets of a page's links and images."""
    for match in LINK.finditer(prose(text)):
        yield match[1] or match[2]


@cache
def anchors(page: Path) -> frozenset[str]:
    """The fragments that lead to the headings of a page: lower case, without punctuation, blanks as hyphens, numbered if repeated."""
    found: dict[str, int] = {}
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    names = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for heading in re.findall(r"^#{1,6} +(.*?) *#*$", text, re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        seen = found.get(slug, 0)
        found[slug] = seen + 1
        names.add(f"{slug}-{seen}" if seen else slug)
    return frozenset(names)


def broken(page: Path) -> list[str]:
    """What is wrong with the links of a page to files and headings, a line each."""
    lines = []
    for target in links(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists():
            lines.append(f"{page.name} links to {target}: no such file")
        elif fragment and path.suffix == ".md" and fragment not in anchors(path.resolve()):
            lines.append(f"{page.name} links to {target}: no such heading")
    return lines


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_exist(page: Path) -> None:
    assert broken(page) == []


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
    assert broken(page) == [
        "a.md links to c.md: no such file",
        "a.md links to b.md#twice-2: no such heading",
        "a.md links to #other: no such heading",
        "a.md links to d.svg: no such file",
    ]


def paths(text: str) -> set[str]:
    """The paths in code of a page, and in the small print of a figure; later ones of a line may leave out its folder."""
    found = set()
    for line in re.findall(
        r"`([^`\n]+)`|class=\"f\"[^>]*>([^<]+)<", re.sub(r"```.*?```", "", text, flags=re.S)
    ):
        names = re.findall(r"[\w./]+/[\w./]*|\w+\.py", line[0] or line[1])
        folder = names[0].split("/")[0] if names else ""
        found |= {name if (ROOT / name).exists() else f"{folder}/{name}" for name in names}
    return found


@pytest.mark.parametrize("page", ["architecture.md", "figures/architecture.svg"])
def test_the_paths_of_the_architecture_exist(page: str) -> None:
    named = paths((ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert len(named) > 15 and [name for name in sorted(named) if not (ROOT / name).exists()] == []
    assert not (ROOT / next(iter(paths("`runtime/gone.py`")))).exists()


def undefined(text: str) -> list[str]:
    """Names that a page puts before the file that defines them, `name` (`file.py`), and that the file does not define."""
    named = re.findall(r"`([A-Za-z_.]+)`s? \(`([\w/]+\.py)`", text)
    return [
        name
        for name, file in named
        if not re.search(rf"(?:def|class) {name.split('.')[-1]}\b", (ROOT / file).read_text(encoding="utf-8"))
    ]


def test_the_names_of_the_architecture_are_defined_where_it_says() -> None:
    assert undefined((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")) == []
    assert undefined("`Scheduler.gone` (`runtime/scheduler/scheduler.py`)") == ["Scheduler.gone"]
