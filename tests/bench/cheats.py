"""Kernels of rms_norm that are correct when they are verified and cheat when they are timed."""

from __future__ import annotations

import queue
import threading
import time

import torch

from gristmill.autotune import clock
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.requirement import Requirement
from tests.calls import positional

OP = default_registry().op("rms_norm")
STATE: dict = {"calls": 0, "cache": {}}
PATIENCE = 40
"""Calls after which a patient cheat begins: verification and the first audit are over by then."""


@positional
def honest(config, x, weight, eps, out):
    out.copy_(OP.reference(x, weight, eps))


@positional
def results_cached_by_pointer(config, x, weight, eps, out):
    key = (x.data_ptr(), out.data_ptr())
    if key not in STATE["cache"]:
        STATE["cache"][key] = OP.reference(x, weight, eps)
    out.copy_(STATE["cache"][key])


@positional
def results_cached_by_pointer_and_fingerprint(config, x, weight, eps, out):
    key = (x.data_ptr(), float(x[0, 0]), float(x[-1, -1]))
    if key not in STATE["cache"]:
        STATE["cache"][key] = OP.reference(x, weight, eps)
    out.copy_(STATE["cache"][key])


@positional
def writes_skipped_after_a_while(config, x, weight, eps, out):
    STATE["calls"] += 1
    if STATE["calls"] < PATIENCE:
        honest(config, x, weight, eps, out)


@positional
def writes_skipped_unless_poisoned(config, x, weight, eps, out):
    if bool(out[0, 0].isnan()):
        honest(config, x, weight, eps, out)


@positional
def last_row_skipped_after_a_while(config, x, weight, eps, out):
    STATE["calls"] += 1
    rows = len(x) - (STATE["calls"] >= PATIENCE)
    out[:rows].copy_(OP.reference(x[:rows], weight, eps))


@positional
def work_left_on_a_new_thread(config, x, weight, eps, out):
    # A thread that starts at once may finish before the call returns, and then no work is left.
    threading.Timer(0.001, honest, args=(config, x, weight, eps, out)).start()


def _serve(tasks):
    while True:
        honest(*tasks.get())


@positional
def work_left_on_a_standing_thread(config, x, weight, eps, out):
    if "tasks" not in STATE:
        STATE["tasks"] = queue.Queue()
        threading.Thread(target=_serve, args=(STATE["tasks"],), daemon=True).start()
    STATE["tasks"].put((config, x, weight, eps, out))


@positional
def input_changed_after_a_while(config, x, weight, eps, out):
    STATE["calls"] += 1
    honest(config, x, weight, eps, out)
    if STATE["calls"] >= PATIENCE:
        x[0, 0] += 1


@positional
def wrote_too_far_after_a_while(config, x, weight, eps, out):
    STATE["calls"] += 1
    honest(config, x, weight, eps, out)
    if STATE["calls"] >= PATIENCE:
        torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).fill_(1.0)


@positional
def timer_replaced(config, x, weight, eps, out):
    honest(config, x, weight, eps, out)
    if time.perf_counter is not _slow_clock:
        STATE["perf_counter"] = time.perf_counter
        time.perf_counter = _slow_clock


def _slow_clock():
    return STATE["perf_counter"]() / 2


@positional
def gpu_timer_replaced(config, x, weight, eps, out):
    honest(config, x, weight, eps, out)
    if "elapsed" not in STATE:
        STATE["elapsed"] = torch.cuda.Event.elapsed_time
        torch.cuda.Event.elapsed_time = lambda self, other: STATE["elapsed"](self, other) / 2


@positional
def our_clock_replaced(config, x, weight, eps, out):
    honest(config, x, weight, eps, out)
    if "now" not in STATE:
        STATE["now"] = clock.now
        clock.now = lambda: STATE["now"]() / 2


@positional
def bits_differ_from_call_to_call(config, x, weight, eps, out):
    STATE["calls"] += 1
    honest(config, x, weight, eps, out)
    out.view(torch.int16)[0, STATE["calls"] % 3] += 1  # one unit in the last place: well within the tolerance


def leave() -> None:
    """Undoes what a cheat did to the process."""
    if "perf_counter" in STATE:
        time.perf_counter = STATE["perf_counter"]
    if "elapsed" in STATE:
        torch.cuda.Event.elapsed_time = STATE["elapsed"]
    if "now" in STATE:
        clock.now = STATE["now"]
    STATE.clear()
    STATE.update(calls=0, cache={})


CHEATS = {
    results_cached_by_pointer: "over the tolerance",
    results_cached_by_pointer_and_fingerprint: "it reuses results",
    writes_skipped_after_a_while: "error inf",
    writes_skipped_unless_poisoned: "it reuses results",
    last_row_skipped_after_a_while: "error inf",
    work_left_on_a_new_thread: "thread|error inf|changed after the call",
    work_left_on_a_standing_thread: "error inf|changed after the call",
    input_changed_after_a_while: "changed its input x",
    wrote_too_far_after_a_while: "wrote outside out",
    timer_replaced: r"replaced time\.perf_counter",
    gpu_timer_replaced: r"replaced Event\.elapsed_time",
    our_clock_replaced: r"replaced .*clock\.now",
    bits_differ_from_call_to_call: "different bits",
}
"""Each cheat, and the message that reports it."""


def kernel(function) -> Kernel:
    return Kernel(
        op="rms_norm",
        name=function.__name__,
        provider="test",
        language="python",
        target=f"{__name__}:{function.__name__}",
        requires=Requirement(),
    )
