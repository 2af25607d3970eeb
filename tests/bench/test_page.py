"""The report page: complete, self-contained, small enough, and safe with any text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

from click.testing import CliRunner

from gristmill.bench.cli import cli
from gristmill.bench.page import page


def rows(count: int, factor: float = 1.0) -> list[dict]:
    made = []
    for n in range(count):
        shape, size, kernel = n // 20, 1 << (n // 2 % 10), ("linear_cpu", "linear_torch")[n % 2]
        us = factor * (10 + size * (1 + n % 2)) * (1 + shape)
        made.append({"op": "linear", "problem": f"m={size},n={512 * (shape + 1)},k=4096", "kernel": kernel, "us": us,
                     "samples": [us * (1 + 0.01 * i) for i in range(9)], "error": 1e-3})  # fmt: skip
    return made


def content(count: int, when: str = "2026-01-01", factor: float = 1.0) -> dict:
    return {"schema": 1, "when": when, "environment": {"target": "cpu:avx2", "device": "Abacus", "command": "kernelbench bench linear"},
            "ceilings": {"read_gbs": 20.0, "tflops": {"bf16": 0.3, "fp32": 0.1}, "launch_us": 0.0}, "rows": rows(count, factor)}  # fmt: skip


class Checker(HTMLParser):
    """Every tag closed, nothing fetched, every circle's row in the table."""

    VOID = {"meta", "br", "path", "link", "img", "input"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.marks: set[int] = set()
        self.tags: list[str] = []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        assert tag not in ("link", "img", "iframe") and "src" not in given and "href" not in given
        self.tags.append(tag)
        if tag == "circle":
            self.marks.add(int(given["data-row"]))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    return checker


def test_every_row_is_there_with_its_command() -> None:
    text = page([("a.json", content(40))])
    checker = checked(text)
    assert checker.marks == set(range(40))
    kept = json.loads(re.search(r'id="rows">(.*?)</script>', text)[1])
    assert len(kept) == 40 and kept[0]["repro"].startswith("kernelbench bench linear --kernels linear_cpu --problem m=1,n=512,k=4096")
    for heading in ("Rooflines", "Time by size", "Fastest, by shape and size", "All rows"):
        assert f"<h2>{heading}</h2>" in text
    assert "History" not in text and "1.09x" in text  # (10 + 2) / (10 + 1), the lead at m=1


def test_1000_rows_stay_under_3_mb_and_need_no_network() -> None:
    text = page([("a.json", content(1000))])
    checked(text)
    assert len(text.encode()) < 3_000_000
    assert not re.search(r"https?://|@import|url\(", text)


def test_history_rings_the_change() -> None:
    files = [(f"{n}.json", content(4, f"2026-01-0{n}", 1.0 if n < 3 else 2.0)) for n in (1, 2, 3)]
    text = page(files)
    checked(text)
    assert "<h2>History</h2>" in text and text.count(" ring") >= 4 and "changed +100%" in text


def test_text_of_a_file_cannot_become_markup() -> None:
    data = content(2)
    data["rows"][0]["kernel"] = '</script><script>alert("1")</script>'
    data["environment"]["command"] = "<b onload=x>"
    text = page([("<i>.json", data)], title="<u>")
    assert checked(text).tags.count("script") == 2 and "<b onload" not in text and "<i>" not in text and "<u>" not in text


def test_files_of_another_day_still_show() -> None:
    data = content(2)
    data["rows"] = [{"op": "gone", "problem": "a=1", "kernel": "k", "us": 3.0}, data["rows"][0] | {"problem": "m=1,colour=red"}]
    text = page([("a.json", data)])
    assert "gone" in text and "colour=red" in text
    assert "No row of these files has a time" in page([("a.json", {"rows": []})])


def test_the_command_line(tmp_path: Path) -> None:
    source, out = tmp_path / "a.json", tmp_path / "deep" / "page.html"
    source.write_text(json.dumps(content(6)))
    done = CliRunner().invoke(cli, ["report", str(source), "--html", str(out), "--json"])
    assert json.loads(done.stdout) == {"page": str(out), "bytes": out.stat().st_size, "rows": 6}
