"""What `lab.engine` reads out of a trace."""

from __future__ import annotations

import pytest

from lab.engine import LONG_GAP, summary


@pytest.mark.parametrize("gap", [LONG_GAP - 1, 50.0])
def test_a_trace_is_kernels_and_what_lies_between_them(gap: float) -> None:
    """Steps of two kernels of 60 and 30 µs, 2 µs apart; a copy runs beside the second."""
    spans = []
    for step in range(10):
        begin = step * (92 + gap)
        spans += [
            (begin, begin + 60, "first"),
            (begin + 62, begin + 92, "second"),
            (begin + 70, begin + 71, "copy"),
        ]
    trace = summary(spans, 4, 10)
    gaps = 9 * gap / 10
    assert trace.step == pytest.approx(92 + gaps) and trace.idle == pytest.approx(2 + gaps)
    assert trace.long_idle == pytest.approx(gaps if gap > LONG_GAP else 0)
    assert trace.launches == 3 and trace.kernels == {"first": 60, "second": 30, "copy": 1}
