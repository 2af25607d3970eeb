"""Kernels that the programs verify are verified in forks, which need not import torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.forked import forked_workers


@pytest.fixture(scope="module", autouse=True)
def _forked_workers() -> Iterator[None]:
    with forked_workers():
        yield
