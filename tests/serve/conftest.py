"""A server over the smallest example model, for the module's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gristmill import LLM
from tests.patient_clients import clients_are_patient  # noqa: F401
from tests.serve.server import MODEL, LocalEngine, service_of, serving, until_ready


@pytest.fixture(scope="package")
def llm() -> LLM:
    """The model."""
    return LLM(MODEL, dtype="fp32", device="cpu", warm="off", max_seqs=8)


@pytest.fixture(scope="package")
def url(llm: LLM) -> Iterator[str]:
    """The address of a server."""
    service = service_of(llm)
    with serving(service, lambda service: LocalEngine(llm)) as address:
        until_ready(service)
        yield address
