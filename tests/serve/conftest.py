"""A server over the smallest example model, for the module's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gristmill import LLM
from tests.serve.server import MODEL, LocalEngine, service_of, serving


@pytest.fixture(scope="package")
def llm() -> LLM:
    """The model."""
    return LLM(MODEL, dtype="fp32", device="cpu", warm="off", max_seqs=8)


@pytest.fixture(scope="package")
def url(llm: LLM) -> Iterator[str]:
    """The address of a server."""
    with serving(service_of(llm), lambda service: LocalEngine(llm)) as address:
        yield address
