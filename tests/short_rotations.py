"""A fixture for the folders whose conftest.py imports it: kernels on a CPU are timed over fewer argument lists, which are audited in less time.

There are two at least, as for large arguments, so that what a kernel keeps of one call is wrong in the next. Times are less cold, which no
test of these folders asks for: tests/autotune/test_reading.py has the numbers of lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from gristmill.autotune import timing


@pytest.fixture(scope="module", autouse=True)
def rotations_are_short() -> Iterator[None]:
    with patch.object(timing, "CPU_COLD", 16 << 20):
        yield
