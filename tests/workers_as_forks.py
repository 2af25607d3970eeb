"""A fixture for the folders whose conftest.py imports it: kernels that their tests verify are verified in forks, which need not import torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.forked import forked_workers


@pytest.fixture(scope="module", autouse=True)
def workers_are_forks() -> Iterator[None]:
    with forked_workers():
        yield
