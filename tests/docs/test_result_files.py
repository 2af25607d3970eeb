"""The tree keeps one result file per present claim: every file is named where its claim is made, and every
name is a file."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
LOGS = ROOT / "docs" / "performance" / "log"
FOLDERS = (
    "autotune",
    "bench",
    "integrations",
    "kernel_registry",
    "kernels",
    "lab",
    "quant",
    "runtime",
    "serve",
    "tools",
    "ci",
    "docs",
    "src/gristmill",
)
NAMED = re.compile(r"bench/results/[\w./*-]*[\w*]")


def texts() -> dict[Path, str]:
    """Returns the pages and sources that may make claims. Logs describe the past, and tests claim nothing."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    for folder in FOLDERS:
        paths += [
            p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".md", ".cu", ".cuh", ".h", ".cpp")
        ]
    return {p: p.read_text(encoding="utf-8") for p in paths if RESULTS not in p.parents}


@cache
def patterns(text: str) -> tuple[str, ...]:
    """Returns the patterns of result files that a page names."""
    return tuple(name for name in NAMED.findall(text) if "*" in name)


def claimed(path: Path, pages: Iterable[str]) -> bool:
    """Whether a page names the file by its path, by a pattern, by folder and name, or by its name if that is
    unique."""
    names = ["/".join(path.parts[-2:])]
    if len([*RESULTS.rglob(path.name)]) == 1:
        names.append(path.name)
    short = re.compile(rf"(?<![\w/])(?:{'|'.join(map(re.escape, names))})")
    relative = path.relative_to(ROOT).as_posix()
    return any(
        relative in text
        or (any(name in text for name in names) and short.search(text) is not None)
        or any(path.match(pattern) for pattern in patterns(text))
        for text in pages
    )


def test_every_result_file_is_named_where_its_claim_is_made() -> None:
    pages = [text for path, text in texts().items() if LOGS not in path.parents]
    files = [path for path in sorted(RESULTS.rglob("*")) if path.is_file()]
    assert files and [str(path.relative_to(ROOT)) for path in files if not claimed(path, pages)] == []


def test_a_file_that_no_page_names_is_seen() -> None:
    """Planted fault: names that are part of another name, and a pattern of another folder."""
    path = RESULTS / "h200" / "decode.json"
    assert claimed(path, ["see bench/results/h200/decode.json."]) and claimed(
        path, ["`bench/results/*/*.json`"]
    )
    assert not claimed(
        path, ["linear_decode.json", "bench/results/*/operations/*.json", "bench/results/h200/"]
    )


def test_every_name_is_a_file() -> None:
    """Checks paths and patterns below bench/results, also in logs, and performance pages that sources name."""
    missing = []
    for path, text in texts().items():
        names = NAMED.findall(text.replace("0c38055:bench/results/", ""))
        for name in [*names, *re.findall(r"docs/performance/[\w/]+\.md", text)]:
            if not any(ROOT.glob(name.rstrip("."))):
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert missing == []


@pytest.mark.parametrize("log", sorted(LOGS.glob("*.md")), ids=lambda path: path.name)
def test_files_of_a_log_are_in_the_tree_or_in_the_commit_that_it_names(log: Path) -> None:
    text = log.read_text(encoding="utf-8")
    names = set(re.findall(r"`(\d+_\w+\.(?:json|txt)|counters\.json|racecheck_minimal\.txt)`", text))
    missing = {name for name in names if not any(RESULTS.rglob(name))}
    if not missing:
        return
    commit = re.search(r"git show (\w+):(bench/results/[\w/]+)/NAME", text)
    assert commit, f"{log.name} names {sorted(missing)}, and no commit that has them"
    listed = subprocess.run(
        ["git", "ls-tree", "--name-only", commit[1], f"{commit[2]}/"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("this checkout has no history back to that commit")
    assert missing <= {Path(line).name for line in listed.stdout.splitlines()}


def test_every_log_belongs_to_a_page() -> None:
    """Exactly one page that is not a log links to each log, and the log links back."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.parent != LOGS]
    for log in LOGS.glob("*.md"):
        owners = [page for page in pages if f"log/{log.name})" in page.read_text(encoding="utf-8")]
        assert len(owners) == 1, log.name
        assert re.search(rf"\]\((\.\./)+{owners[0].name}[#)]", log.read_text(encoding="utf-8")), log.name
