"""The report page: complete, self-contained, small, and safe with any text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from gristmill.bench.cli import cli
from gristmill.bench.report import page as page_module
from gristmill.bench.report.charts import LINE, spread
from gristmill.bench.report.looks import COLOURS, SHAPES, Look, provider_look
from gristmill.bench.report.page import page


def rows(count: int, factor: float = 1.0) -> list[dict]:
    actual = []
    for n in range(count):
        shape, size, kernel = n // 20, 1 << (n // 2 % 10), ("linear_cpu", "linear_torch")[n % 2]
        us = factor * (10 + size * (1 + n % 2)) * (1 + shape)
        actual.append(
            {
                "op": "linear",
                "problem": f"m={size},n={512 * (shape + 1)},k=4096",
                "kernel": kernel,
                "us": us,
                "samples": [us * (1 + 0.01 * i) for i in range(9)],
                "error": 1e-3,
            }
        )
    return actual


def content(count: int, when: str = "2026-01-01", factor: float = 1.0) -> dict:
    return {
        "schema": 1,
        "when": when,
        "environment": {"target": "cpu:avx2", "device": "Abacus", "command": "kernelbench bench linear"},
        "ceilings": {"read_gbs": 20.0, "tflops": {"bf16": 0.3, "fp32": 0.1}, "launch_us": 0.0},
        "rows": rows(count, factor),
    }


class Checker(HTMLParser):
    """Checks that every tag is closed and nothing is fetched. marks: the rows that points and buttons lead
    to."""

    VOID = {"meta", "wbr", "input"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.marks: set[int] = set()
        self.tags: list[str] = []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        assert (
            tag not in ("link", "img", "iframe")
            and "src" not in values
            and values.get("href", "#").startswith("#")
        )
        self.tags.append(tag)
        if "data-row" in values:
            self.marks.add(int(values["data-row"]))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

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
    page_rows = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    assert len(page_rows) == 40 and page_rows[0]["repro"].startswith(
        "kernelbench bench linear --kernels linear_cpu --problem m=1,n=512,k=4096"
    )
    for heading in (
        "Files",
        "Rooflines",
        "Time by size",
        "Fastest, by shape and size",
        "History",
        "All rows",
    ):
        assert f">{heading}</h2>" in text
    assert "so there is no history" in text and "1.09×" in text  # (10 + 2) / (10 + 1), the ratio at m=1


def test_1000_rows_stay_under_3_mb_and_need_no_network() -> None:
    text = page([("a.json", content(1000))])
    checked(text)
    assert len(text.encode()) < 3_000_000
    assert not re.search(r"https?://|@import|url\(", text)


def test_history_rings_the_change() -> None:
    files = [(f"{n}.json", content(4, f"2026-01-0{n}", 1.0 if n < 3 else 2.0)) for n in (1, 2, 3)]
    text = page(files)
    checked(text)
    assert text.count('class="ring"') == 4 and "changed +100%" in text and "Nothing changed" not in text
    assert "Nothing changed" in page(files[:2])


def test_a_lead_within_the_noise_is_a_tie_and_devices_are_not_mixed() -> None:
    near, far = content(2), content(2)
    for row, us in zip(near["rows"] + far["rows"], (10.0, 10.02, 10.0, 11.0), strict=True):
        row |= {"us": us, "samples": [us * (1 + 0.01 * i) for i in range(-4, 5)]}
    assert "tie with torch" in page([("a.json", near)]) and "1.10×" in page([("b.json", far)])
    far["environment"]["device"] = "Sundial"
    far["rows"] = far["rows"][1:]
    text = page([("a.json", near), ("b.json", far)])
    assert (
        "Fastest, linear on Abacus" in text
        and "Fastest, linear on Sundial" not in text
        and text.count('class="empty"') == 2
    )


def test_only_the_newest_time_of_a_row_is_compared() -> None:
    old, new = content(2, "2026-01-01"), content(2, "2026-01-02", 3.0)
    winners = page([("new.json", new), ("old.json", old)]).split('id="winners"')[1].split('id="history"')[0]
    assert "33.0 µs, 1.09×" in winners and "11.0 µs" not in winners


def test_how_a_kernel_was_timed_is_part_of_its_series() -> None:
    data = content(2)
    data["rows"][1] |= {"kernel": "linear_cpu", "timing": "eager,hot", "us": 5.0}
    text = page([("a.json", data)])
    assert "cpu (eager,hot)" in text and "linear_cpu (eager,hot)" in text


def test_a_point_tells_its_other_timings_and_its_speed_up() -> None:
    data = content(2)
    data["rows"][0] |= {
        "timing": "eager,cold",
        "baseline": "linear_torch",
        "speedup": 1.25,
        "times": {"eager,cold": {"us": 11.0}, "eager,hot": {"us": 7.0}},
    }
    page_rows = json.loads(re.search(r'id="data">(.*?)</script>', page([("a.json", data)]))[1])
    assert (
        page_rows[0]["timed"] == "eager,cold"
        and page_rows[0]["eager,hot"] == "7.00 µs"
        and page_rows[0]["speedup"] == "1.25× linear_torch"
    )
    assert (
        "eager,cold" not in page_rows[0] and "eager,hot" not in page_rows[1] and "speedup" not in page_rows[1]
    )


def test_a_file_of_regret_has_a_page() -> None:
    """Its times are of kernels and their configurations, not of timing modes."""
    data = content(2)
    data["rows"][0]["times"] = {"rms_norm_cpu": {"of": "level", "us": {"avx2": 3.0}}}
    checked(page([("regret.json", data)]))


def test_rows_without_a_time_say_why() -> None:
    data = content(2)
    data["rows"].append(
        {
            "op": "linear",
            "problem": "m=1,n=512,k=4096",
            "kernel": "linear_humming",
            "us": None,
            "reason": "needs <CUDA>",
        }
    )
    text = page([("a.json", data)])
    assert "1 row has no time" in text and "needs &lt;CUDA&gt;" in text and "2 of 3 rows timed" in text


@pytest.mark.parametrize(
    "heights", [[10.0, 10.0, 10.0], [229.0, 229.5, 230.0], [20.0, 100.0], [float(n) for n in range(10)]]
)
def test_names_beside_a_chart_stay_apart_and_inside(heights: list[float]) -> None:
    placed = spread(heights, 10, 230)
    assert (
        all(b - a >= LINE - 1e-9 for a, b in zip(placed, placed[1:], strict=False))
        and placed[0] >= 10 - LINE
        and placed[-1] <= 230
    )


def test_text_of_a_file_cannot_become_markup() -> None:
    data = content(2)
    data["rows"][0]["kernel"] = '</script><script>alert("1")</script>'
    data["environment"]["command"] = "<b onload=x>"
    text = page([("<i>.json", data)], title="<u>")
    assert (
        checked(text).tags.count("script") == 2
        and "alert" in text
        and "<b onload" not in text
        and "<i>" not in text
        and "<u>" not in text
    )


def test_files_of_another_day_still_show() -> None:
    data = content(2)
    data["rows"] = [
        {"op": "gone", "problem": "a=1", "kernel": "k", "us": 3.0},
        data["rows"][0] | {"problem": "m=1,colour=red"},
    ]
    text = page([("a.json", data)])
    assert "gone" in text and "colour=red" in text
    text = page([("a.json", {"rows": []})])
    assert "No row of these files has a time" in text and text.count('class="empty"') == 5


def test_the_command_line(tmp_path: Path) -> None:
    source, out = tmp_path / "a.json", tmp_path / "deep" / "page.html"
    source.write_text(json.dumps(content(6)))
    result = CliRunner().invoke(cli, ["report", str(source), "--html", str(out), "--json"])
    assert json.loads(result.stdout) == {"page": str(out), "bytes": out.stat().st_size, "rows": 6}


def test_a_time_below_its_floor_is_marked() -> None:
    data = content(4)
    for row, share in zip(data["rows"], (0.5, 1.0, 1.05, 2.0), strict=True):
        row["fraction_of_floor"] = share
    # In the table and in the data of the panel.
    assert page([("a.json", data)]).count("above its floor") == 2 * 2


def drawn(text: str, providers: dict[str, str]) -> dict[str, set[tuple[str, str]]]:
    """Maps each provider to the (colour, outline) of its marks in charts, legends, tables and cells of a
    page."""
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    styles: dict[str, set[tuple[str, str]]] = {}
    for colour, outline, row in re.findall(
        r'<path class="mark (c\d) v\d" d="M[\d.]+ [\d.]+(m[^"]*)" data-row="(\d+)"', text
    ):
        styles.setdefault(providers[data[int(row)]["kernel"]], set()).add((colour, outline))
    for colour, outline, kernel in re.findall(
        r'<path class="mark (c\d) v\d" d="M0 0(m[^"]*)"/></svg>([a-z_0-9]+)</td>', text
    ):
        styles.setdefault(providers[kernel], set()).add((colour, outline))
    return styles


def of_kernels(op: str, kernels: tuple[str, ...], shape: str) -> dict:
    data = content(0)
    data["rows"] = [
        {"op": op, "problem": f"m={m},{shape}", "kernel": kernel, "us": 5.0 + m + place}
        for place, kernel in enumerate(kernels)
        for m in (1, 16)
    ]
    return data


PROVIDERS = {
    "linear_cpu": "gristmill",
    "linear_w_triton": "gristmill",
    "linear_humming": "humming",
    "linear_torch": "torch",
    "rms_norm_flashinfer": "flashinfer",
    "rms_norm_torch": "torch",
    "rms_norm_triton": "gristmill",
}
LINEAR = of_kernels(
    "linear", ("linear_torch", "linear_humming", "linear_w_triton", "linear_cpu"), "n=512,k=4096"
)
NORMS = of_kernels("rms_norm", ("rms_norm_triton", "rms_norm_flashinfer", "rms_norm_torch"), "n=4096")


def test_a_provider_has_one_colour_and_mark_on_every_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [
        page([("a.json", LINEAR)]),
        page([("a.json", LINEAR), ("b.json", NORMS)]),
        page([("b.json", NORMS)]),
    ]
    styles: dict[str, set[tuple[str, str]]] = {}
    for text in pages:
        for provider, marks in drawn(text, PROVIDERS).items():
            styles.setdefault(provider, set()).update(marks)
    assert styles.keys() == set(PROVIDERS.values())
    assert all(len(marks) == 1 for marks in styles.values()), styles
    assert len(set().union(*styles.values())) == len(styles), "two providers are drawn alike"

    # Planted fault: colours by order of appearance.
    def by_order(rows: list) -> dict:
        series = dict.fromkeys((row.op, row.series) for row in rows)
        return {key: Look(n % COLOURS, n % len(SHAPES)) for n, key in enumerate(series)}

    monkeypatch.setattr(page_module, "looks", by_order)
    wrong = drawn(page([("a.json", LINEAR), ("b.json", NORMS)]), PROVIDERS)
    assert any(len(marks) > 1 for marks in wrong.values())


def test_kernels_of_one_provider_differ_in_their_fill() -> None:
    marks = set(re.findall(r'class="(mark c0 v\d)"', page([("a.json", LINEAR)])))
    assert marks == {"mark c0 v0", "mark c0 v1"}
    other = provider_look("someone")
    assert other == provider_look("someone") and other.colour == COLOURS - 1
