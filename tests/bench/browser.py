"""A page in headless Chromium and its faults: serious findings of axe-core, horizontal overflow, errors on
the console, requests to any network.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LOCAL = ("file:", "data:", "blob:", "about:")


def missing() -> str:
    """Returns a sentence that names what is not installed, or ""."""
    lacks = [] if _chromium() else ["chromium"]
    lacks += [
        name for name in ("playwright", "axe_playwright_python") if importlib.util.find_spec(name) is None
    ]
    return f"not installed: {', '.join(lacks)}; ci/browser.sh installs it" if lacks else ""


def _chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def browser() -> Iterator[Any]:
    """Starts a headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=_chromium(), args=FLAGS)
        try:
            yield running
        finally:
            running.close()


@dataclass
class OpenPage:
    """An open page and the errors it has caused so far: messages on its console, requests to a network."""

    page: Any
    heard: list[str] = field(default_factory=list)

    def faults(self, axe: bool = True) -> list[str]:
        """Returns the faults of the page in its present state, one line each."""
        actual = list(self.heard)
        width, content = self.page.evaluate(
            "[document.documentElement.clientWidth, document.documentElement.scrollWidth]"
        )
        if content > width:
            actual.append(f"overflow: {content} pixels wide in {width}")
        if axe:
            from axe_playwright_python.sync_playwright import Axe

            answer = Axe().run(self.page).response
            assert answer["passes"], "axe-core looked at nothing"
            for one in answer["violations"]:
                if one["impact"] in ("serious", "critical"):
                    actual.append(
                        f"axe: {one['id']} ({one['impact']}): {one['nodes'][0]['html'][:200]}: {one['nodes'][0]['failureSummary']}"
                    )
        return actual


@contextmanager
def opened(running: Any, path: Path | str, width: int, scheme: str) -> Iterator[OpenPage]:
    """Opens a page, a file or an address, in a window `width` pixels wide. scheme: ``light`` or ``dark``. Requests to the address's own
    server are no fault."""
    address = path if isinstance(path, str) else path.resolve().as_uri()
    own = (*LOCAL, address.rpartition("/")[0] + "/") if isinstance(path, str) else LOCAL
    context = running.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    try:
        actual = OpenPage(context.new_page())
        actual.page.on(
            "console",
            lambda message: message.type == "error" and actual.heard.append(f"console: {message.text}"),
        )
        actual.page.on("pageerror", lambda error: actual.heard.append(f"console: {error}"))
        actual.page.on(
            "request",
            lambda request: request.url.startswith(own) or actual.heard.append(f"network: {request.url}"),
        )
        actual.page.goto(address)
        yield actual
    finally:
        context.close()
