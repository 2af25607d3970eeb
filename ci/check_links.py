"""Check the links of the Markdown pages: files, headings, and with --external other sites. ``python ci/check_links.py [--external]``."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")
GONE = (404, 410)
"""Answers that say that a page is not there. Others, such as 403, say that it does not want to be asked by a program."""


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


def unreachable(url: str, open_url: Callable[..., object] = urllib.request.urlopen) -> str:
    """Why a page of another site cannot be read; "" if it can, or if the site refuses programs."""
    request = urllib.request.Request(url, headers={"User-Agent": "Mozilla/5.0 (link check of gristmill)"})
    why = ""
    for attempt in range(3):
        try:
            open_url(request, timeout=30)
        except urllib.error.HTTPError as error:
            return f"{url}: {error.code}" if error.code in GONE else ""
        except OSError as error:
            why = f"{url}: {error}"
            time.sleep(attempt)
        else:
            return ""
    return why


def main() -> int:
    """Check; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--external", action="store_true", help="also ask other sites")
    options = parser.parse_args()
    lines = [line for page in pages() for line in broken(page)]
    if options.external:
        urls = {
            url
            for page in pages()
            for url in links(page.read_text(encoding="utf-8"))
            if url.startswith("http")
        }
        lines += [why for url in sorted(urls) if (why := unreachable(url))]
    for line in lines:
        print(line, file=sys.stderr)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
