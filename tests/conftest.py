"""Shared set-up: the package of this checkout is tested; Triton kernels run in the interpreter unless there is a GPU; every test has its own
store and cache."""

from __future__ import annotations

import atexit
import gc
import os
import ssl
import sys
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest

import gristmill

ROOT = Path(__file__).resolve().parents[1]


def complaint(imported: str | None, root: Path) -> str | None:
    """Why tests of the checkout `root` must not run with the package whose ``__file__`` is `imported`; None if they may."""
    expected = root / "src" / "gristmill" / "__init__.py"
    if imported is not None and Path(imported).resolve() == expected.resolve():
        return None
    return (
        f"these are the tests of {root}, but the gristmill that was imported belongs to another checkout or an installation\n"
        f"expected: {expected}\n"
        f"imported: {imported}\n"
        f"An editable installation precedes PYTHONPATH. Use this checkout's own environment ({root / '.venv'}, which `make setup` makes), or "
        f"remove that installation: {sys.executable} -m pip uninstall gristmill"
    )


if _reason := complaint(gristmill.__file__, ROOT):
    # Here, before anything else of the package is imported, since another checkout may not have it.
    raise pytest.UsageError(_reason)

from gristmill.kernel_registry.targets.probe import probe_devices  # noqa: E402

HAS_GPU = bool(probe_devices().targets)
if not HAS_GPU:
    # Must come before any import of triton, whose decorators read this when kernels are defined.
    os.environ["TRITON_INTERPRET"] = "1"

# Lets modules in C free what they hold as the interpreter ends; nanobind's complain otherwise. Not before: pytest collects at its end.
atexit.register(gc.unfreeze)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests marked gpu where there is no device."""
    if HAS_GPU:
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects tests without garbage collections, which find nothing there and take a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leaves what the collection of tests has made out of garbage collections: with it, each takes a second or more. So does one here, which
    would find some megabytes."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The same for what a file's tests have left, such as imported modules and caches."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture
def policy_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a policy as TOML and makes it the current one, with a cache and a store for this test."""

    def write(text: str = "") -> Path:
        path = tmp_path / "policy.toml"
        # A TOML table contains everything that follows it, so the paths come first.
        path.write_text(f'cache = "{tmp_path / "cache"}"\n{text}', encoding="utf-8")
        monkeypatch.setenv("GRISTMILL_POLICY", str(path))
        return path

    return write


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """Clients of HTTP share one context of TLS per file of certificates: to make one takes 25 ms, for every `httpx.get`."""
    with patch.object(ssl, "create_default_context", cache(ssl.create_default_context)):
        yield


@pytest.fixture(autouse=True)
def _no_mode_is_left() -> Iterator[None]:
    """A test that leaves a dispatch mode active, such as a FakeTensorMode, fails itself, instead of the tests
    that follow it."""
    yield
    if "torch" not in sys.modules:
        return
    from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode

    active = []
    while (mode := _get_current_dispatch_mode()) is not None:
        active.append(type(mode).__name__)
        _pop_mode()
    assert not active, f"the test left {', '.join(active)} active"
