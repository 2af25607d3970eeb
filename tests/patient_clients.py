"""A fixture for the folders whose conftest.py imports it: HTTP clients that are given no limit wait for a minute. Theirs is five seconds, for
which a busy machine may stop a server."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from unittest.mock import patch

import httpx
import pytest


@pytest.fixture(scope="session", autouse=True)
def clients_are_patient() -> Iterator[None]:
    limit = (
        inspect.signature(httpx.get).parameters["timeout"].default
    )  # one object, of all functions and clients
    with patch.multiple(limit, connect=60.0, read=60.0, write=60.0, pool=60.0):
        yield
