"""A fixture for the folders whose conftest.py imports it: a warm-up of an engine need not freeze the heap.

tests/conftest.py has frozen it, and to count millions of frozen objects, as `freeze_heap` does, takes up to a second.
tests/runtime/test_heap.py is about that function.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from gristmill.runtime import engine


@pytest.fixture(scope="module", autouse=True)
def heap_is_frozen() -> Iterator[None]:
    with patch.object(engine, "freeze_heap", lambda owner: None):
        yield
