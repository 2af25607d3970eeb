"""The page in Chromium: chat, load and kernels, by keyboard, wide and narrow, light and dark; each check with a planted fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from gristmill import LLM
from gristmill.runtime.completion import Chunk
from gristmill.runtime.sampling_params import SamplingParams
from tests.bench.browser import browser, missing, opened
from tests.serve.scripted import ScriptedEngine
from tests.serve.server import service_of, serving
from tests.serve.test_rules import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

LOOKS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
ANSWER = "<script>document.title = 'executed'</script> and a_very_long_word_" + "x" * 300


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser."""
    with browser() as running:
        yield running


def answer(ids: Sequence[int], params: SamplingParams) -> list[Chunk]:
    """Markup, in pieces."""
    pieces = [ANSWER[at : at + 7] for at in range(0, len(ANSWER), 7)]
    return [Chunk(0, (1,), piece, "stop" if piece is pieces[-1] else None) for piece in pieces]


@pytest.fixture(scope="module")
def page(llm: LLM) -> Iterator[str]:
    """The address of the page of a server that answers with markup."""
    with serving(service_of(llm, served_model_name=["m"]), lambda service: ScriptedEngine(answer)) as url:
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        yield f"{url}/ui"


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_chat_load_and_kernels(chromium: Any, page: str, width: int, scheme: str) -> None:
    """By keyboard alone; text of the model is text."""
    with opened(chromium, page, width, scheme) as tab:
        one = tab.page
        wait_for(lambda: one.evaluate("document.title === 'gristmill: m'"))
        assert tab.faults() == []
        one.locator("#text").focus()
        one.keyboard.type("Hello\tthere")
        one.keyboard.press("Enter")
        wait_for(lambda: one.evaluate("document.querySelector('#figures').textContent !== ''"))
        assert one.locator("#messages li").count() == 2
        assert one.locator("#messages li.assistant").inner_text().endswith(ANSWER)
        assert one.title() == "gristmill: m"
        assert tab.faults() == []
        one.locator("#tab-chat").focus()
        for name in ("load", "kernels"):
            one.keyboard.press("ArrowRight")
            assert one.locator(f"#{name}").is_visible()
            assert not one.locator("#chat").is_visible()
            assert tab.faults() == []


def test_an_answer_can_be_stopped(chromium: Any, llm: LLM) -> None:
    """The request ends in the engine; what had come stays."""
    engine = ScriptedEngine(answer, seconds=0.1)
    with (
        serving(service_of(llm), lambda service: engine) as url,
        opened(chromium, f"{url}/ui", 800, "light") as tab,
    ):
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        tab.page.locator("#text").fill("Hello")
        tab.page.locator("#send").click()
        wait_for(
            lambda: tab.page.evaluate(
                "document.querySelector('#messages li.assistant span')?.textContent.length > 5"
            )
        )
        tab.page.locator("#stop").click()
        wait_for(lambda: engine.left == 1)
        assert tab.page.locator("#send").is_enabled()
        assert tab.page.locator("#messages li").count() == 2


def test_a_key_is_asked_for(chromium: Any, llm: LLM, tmp_path: Path) -> None:
    """The page says so, takes one, and goes on."""
    keys = tmp_path / "keys"
    keys.write_text("the-key\n")
    with (
        serving(service_of(llm, api_key_file=str(keys)), lambda service: ScriptedEngine()) as url,
        opened(chromium, f"{url}/ui", 800, "light") as tab,
    ):
        tab.page.locator("#key").wait_for(state="visible")
        tab.page.locator("#key").fill("the-key")
        tab.page.keyboard.press("Enter")
        wait_for(lambda: tab.page.evaluate("document.title !== 'gristmill'"))
        assert not tab.page.locator("#access").is_visible()


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ("document.querySelector('#main').append(document.createElement('button'))", "axe: button-name"),
        ("document.querySelector('#state').style.color = 'rgb(150,150,150)'", "axe: color-contrast"),
        ("document.querySelector('h1').style.minWidth = '900px'", "overflow: "),
        ("console.error('planted')", "console: planted"),
    ],
)
def test_a_planted_fault_is_found(chromium: Any, page: str, script: str, kind: str) -> None:
    """The checks can fail."""
    with opened(chromium, page, 390, "light") as tab:
        wait_for(lambda: tab.page.evaluate("document.title === 'gristmill: m'"))
        tab.page.evaluate(script)
        assert any(one.startswith(kind) for one in tab.faults()), tab.faults()
