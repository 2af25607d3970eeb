"""The report page in Chromium: wide and narrow windows, light and dark, keyboard; each check with a planted
fault."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill.bench.report.page import page
from tests.bench.browser import browser, missing, opened
from tests.bench.test_page import content

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

LOOKS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three dated files with a change in the third, long names, ties, rows without a time, and a second
    device."""
    files = [(f"{n}.json", content(20, f"2026-01-0{n}T10:00:00", 1.0 if n < 3 else 2.0)) for n in (1, 2, 3)]
    other = content(40, "2026-02-01")
    other["environment"]["device"] = "Another device with a rather long name, such as vendors like them"
    other["rows"][1]["us"], other["rows"][1]["samples"] = other["rows"][0]["us"], other["rows"][0]["samples"]
    for row in other["rows"][20:]:
        row["kernel"] += "_with_a_name_that_does_not_fit_beside_any_chart"
    other["rows"] += [
        {
            "op": "linear",
            "problem": "m=1,n=512,k=4096",
            "kernel": "linear_humming",
            "us": None,
            "reason": "not here " * 30,
        }
    ]
    path = tmp_path_factory.mktemp("report") / "page.html"
    path.write_text(page([*files, ("other" * 12 + ".json", other)], "A report " + "of_long_words_" * 8))
    return path


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_nothing_is_wrong(chromium: Any, report: Path, width: int, scheme: str) -> None:
    with opened(chromium, report, width, scheme) as tab:
        assert tab.faults() == []
        tab.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        tab.page.locator("[data-row]").last.click()
        assert tab.page.locator("#panel pre").is_visible() and tab.faults() == []


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_an_empty_page_is_right_too(chromium: Any, tmp_path: Path, width: int, scheme: str) -> None:
    path = tmp_path / "page.html"
    path.write_text(page([("a.json", {"rows": []})]))
    with opened(chromium, path, width, scheme) as tab:
        assert tab.faults() == [] and tab.page.locator(".empty").count() == 5


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("<button></button>", "axe: button-name"),
        ('<p style="color:#777;background:#888">faint</p>', "axe: color-contrast"),
        ('<div style="width:500px">wide</div>', "overflow: "),
        ("<script>console.error('planted')</script>", "console: planted"),
        ("<script>null.planted</script>", "console: Cannot read properties of null"),
        (
            '<img alt="planted" src="http://127.0.0.1:9/planted.png">',
            "network: http://127.0.0.1:9/planted.png",
        ),
        ("<script>fetch('http://127.0.0.1:9/planted')</script>", "network: http://127.0.0.1:9/planted"),
    ],
)
def test_a_planted_fault_is_found(chromium: Any, tmp_path: Path, fault: str, kind: str) -> None:
    text = page([("a.json", content(4))])
    policy = text[text.index("<meta http-equiv") : text.index("<style>")]
    path = tmp_path / "page.html"
    path.write_text(text.replace(policy, "").replace("</main>", f"{fault}</main>"))
    with opened(chromium, path, 390, "light") as tab:
        tab.page.wait_for_load_state("networkidle")
        assert any(one.startswith(kind) for one in tab.faults()), tab.faults()


def test_the_page_forbids_itself_the_network(chromium: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(
        page([("a.json", content(4))]).replace(
            "</main>", '<img alt="" src="http://127.0.0.1:9/planted.png"></main>'
        )
    )
    with opened(chromium, path, 390, "light") as tab:
        assert any("Content Security Policy" in one for one in tab.faults(axe=False))


def test_every_point_leads_to_its_command_by_keyboard(chromium: Any, report: Path) -> None:
    with opened(chromium, report, 1280, "light") as tab:
        chart = tab.page.locator("#latency figure > svg").first
        count = chart.locator(".mark").count()
        assert chart.locator('.mark[tabindex="0"]').count() == 1 and count > 10, (
            "one stop for the tabulator a chart"
        )
        chart.locator('.mark[tabindex="0"]').focus()
        commands = set()
        for _ in range(count):
            tab.page.keyboard.press("Enter")
            commands.add(tab.page.locator("#panel pre").inner_text())
            tab.page.keyboard.press("ArrowRight")
        assert len(commands) == count and all(
            text.startswith("kernelbench bench linear --kernels linear_") for text in commands
        )
        tab.page.keyboard.press("Escape")
        assert not tab.page.locator("#panel").is_visible()


def test_every_mark_and_cell_has_a_command(chromium: Any, report: Path) -> None:
    with opened(chromium, report, 1280, "light") as tab:
        bare = tab.page.evaluate("""[...document.querySelectorAll('[data-row]')].filter(node => {
            choose(node);
            return !document.querySelector('#panel pre').textContent.startsWith('kernelbench bench ');
        }).length""")
        assert bare == 0 and tab.page.locator(".mark[data-row]").count() > 100


def test_a_click_near_a_point_means_it(chromium: Any, report: Path) -> None:
    with opened(chromium, report, 390, "light") as tab:
        mark = tab.page.locator("#latency .mark").first
        mark.scroll_into_view_if_needed()
        box = mark.bounding_box()
        tab.page.mouse.click(box["x"] + box["width"] / 2 + 9, box["y"] - 5)
        assert tab.page.locator("#panel pre").is_visible()


def test_the_table_filters_and_sorts(chromium: Any, report: Path) -> None:
    with opened(chromium, report, 1280, "light") as tab:
        tab.page.locator("#filter").fill("linear_torch m=1,")
        visible_rows = tab.page.locator("#all tbody tr:visible")
        assert 0 < visible_rows.count() < 20 and tab.page.locator("#count").inner_text().startswith(
            f"{visible_rows.count()} of "
        )
        tab.page.locator("#filter").fill("")
        head = tab.page.locator("#all th", has_text="µs per call")
        for order, turned in (("ascending", False), ("descending", True)):
            head.locator("button").click()
            assert head.get_attribute("aria-sort") == order
            values = tab.page.evaluate(
                "[...document.querySelectorAll('#all tbody tr')].map(line => +line.cells[4].dataset.value)"
            )
            assert values == sorted(values, reverse=turned)


def test_1000_rows_open_quickly(chromium: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page([("a.json", content(1000))]))
    assert path.stat().st_size < 3_000_000
    with opened(chromium, path, 390, "dark") as tab:
        assert tab.faults(axe=False) == []
        spent = tab.page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
        assert spent < 10_000, f"{spent:.0f} ms until it was loaded"
