"""What is read out of a trace of the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gristmill.bench import decode
from gristmill.bench.device_trace import LONG_GAP, summary


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


def test_a_trace_without_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match="recorded no kernel"):
        summary([], 1, 1)


def test_decode_leaves_the_first_replay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of the replays has a kernel of 1,000 µs, which waits; the others have two of 10 and 20, 5 apart."""
    begin, spans = 0.0, list[tuple[float, float, str]]()
    for replay in range(decode.TRACED_STEPS + 1):
        for name, length in (("sum", 10.0 if replay else 1000.0), ("linear", 20.0)):
            spans.append((begin, begin + length, name))
            begin += length + 5
    calls: list[int] = []

    def planted(run: Callable[[], object]) -> list[tuple[float, float, str]]:
        run()
        return spans

    monkeypatch.setattr(decode, "recorded", planted)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    trace = decode._trace(lambda: calls.append(1), 3)
    assert len(calls) == decode.TRACED_STEPS + 1 and trace.batch == 3 and trace.launches == 2
    assert trace.kernels == {"linear": 20, "sum": 10}
    assert trace.idle == pytest.approx(10 - 5 / decode.TRACED_STEPS)
