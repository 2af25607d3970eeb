"""Workers that are forks: they verify as new processes do, their ends are told as those of new ones, and nothing is forked where it could do harm.

Each program runs in a process of its own, with one thread. Drivers are planted: there is no device.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.forked import RUNTIME, run

SETUP = """
import os, sys, threading, time, torch
from gristmill.autotune import forks
from gristmill.autotune.worker import Worker, Workers, forked_workers, shared_workers
from gristmill.kernel_registry.registry import default_registry

forks.DEVICE_FILES = (os.devnull,)
forks._driver_works = lambda: True
OP = default_registry().op("rms_norm")
PROBLEM = OP.problem("m=4,n=64")

def verify(worker, kernel="rms_norm_torch"):
    return worker.verify(OP, default_registry().kernel("rms_norm", kernel), {}, PROBLEM, "cpu")

def runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
"""


def program(code: str) -> str:
    """What a program printed; it must have ended well."""
    done = run("-c", SETUP + code, imported=RUNTIME, env=os.environ | {"GM_BEFORE": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_forks_verify_and_end_with_the_block() -> None:
    printed = program("""
sys.stdout.write("once ")  # and not yet flushed
class Finalized:
    def __del__(self):
        os.write(1, b"finalized ")
held = Finalized(); held.itself = held
del held
import atexit; atexit.register(lambda: os.write(1, f"exit {os.getpid() == OWN}".encode()))
OWN = os.getpid()
with forked_workers(), shared_workers().allow(2):
    with shared_workers().one() as a, shared_workers().one() as b:
        assert verify(a)["ok"] and verify(b)["ok"] and a.is_fork and b.is_fork
        pids = [a._process.pid, b._process.pid, forks._current._pid]
        assert len({os.getpgid(pid) for pid in pids} | {os.getpgid(0)}) == 4
    assert all(map(runs, pids))
assert not any(map(runs, pids)) and not shared_workers().first.is_alive
with shared_workers().one() as again:
    assert verify(again)["ok"] and not again.is_fork
    again.close()
forks.gc.collect()
""")
    assert printed.replace("finalized ", "", 1) == "once exit True", "a fork wrote, or ended, as its parent"


def test_forks_have_the_environment_of_now() -> None:
    program("""
from gristmill.autotune.child import serve
def answer(task):
    return [os.environ.get(name) for name in ("GM_BEFORE", "GM_LATER")] + [sys.argv[1:], torch.get_num_threads()]
sys.argv = ["program", "argument"]
with forks.forking(lambda: lambda: serve(lambda: answer)):
    os.environ["GM_LATER"] = "2"
    del os.environ["GM_BEFORE"]
    worker = Worker()
    worker.write(None)
    found = worker.read()
    assert found[:3] == [None, "2", []], found
    worker.close()
""")


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("os.kill(os.getpid(), 11)", -signal.SIGSEGV),
        ("os._exit(7)", 7),
        ("raise RuntimeError", 1),
    ],
)
def test_a_fork_that_dies_is_told_and_replaced_by_another(fault: str, status: int) -> None:
    program(f"""
from gristmill.autotune import verify as module
def die(*arguments, **named):
    {fault}
real, module.Verifier.verify = module.Verifier.verify, lambda self, op, kernel, *rest: (
    die() if kernel.name != "rms_norm_torch" else real(self, op, kernel, *rest))
other = next(k.name for k in default_registry().kernels_of("rms_norm") if k.name != "rms_norm_torch")
with forked_workers(), shared_workers().one() as worker:
    outcome = verify(worker, other)
    assert not outcome["ok"] and outcome["judged"], outcome
    assert outcome["reason"] == "killed its process (exit status {status})", outcome
    assert verify(worker)["ok"] and worker.is_fork
""")


def test_one_that_answers_too_late_is_ended() -> None:
    program("""
from gristmill.autotune import verify as module
module.Verifier.verify = lambda *arguments: time.sleep(60)
with forked_workers(), shared_workers().one() as worker:
    worker.timeout, begin = 0.5, time.monotonic()
    assert "no answer in 0 s" in verify(worker)["reason"] and not worker.is_alive
assert time.monotonic() - begin < 20
""")


@pytest.mark.parametrize(
    "fault",
    [
        "forks._driver_works = lambda: False",
        "forks._driver_works = lambda: os._exit(1)",
        "forks._driver_works = lambda: 1 / 0",
        "forks.READY_SECONDS = 0.3; forks._driver_works = lambda: time.sleep(60)",
    ],
    ids=["refuses", "dies", "raises", "hangs"],
)
def test_a_driver_that_does_not_work_in_forks_makes_new_processes(fault: str) -> None:
    program(f"""
{fault}
with forked_workers(), shared_workers().one() as worker:
    assert verify(worker)["ok"] and not worker.is_fork
    assert forks.fork() is None
worker.close()
""")


def test_a_server_that_is_killed_takes_nothing_with_it() -> None:
    program("""
with forked_workers(), shared_workers().allow(2), shared_workers().one() as a, shared_workers().one() as b:
    assert verify(a)["ok"] and a.is_fork
    os.kill(forks._current._pid, 9)
    while runs(forks._current._pid):
        time.sleep(0.01)
    assert verify(a)["ok"] and a.is_fork, "its forks go on"
    assert verify(b)["ok"] and not b.is_fork
    pid = a._process.pid
    b.close()
assert not runs(pid)
""")


def test_forks_end_with_a_parent_that_is_killed() -> None:
    pids = program("""
if os.fork() == 0:
    with forked_workers(), shared_workers().one() as worker:
        assert verify(worker)["ok"] and worker.is_fork
        print(worker._process.pid, forks._current._pid, flush=True)
        os.kill(os.getpid(), 9)
os.wait()
""").split()
    assert len(pids) == 2
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat")
        for _ in range(1000):
            if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
                break
            signal.sigtimedwait([], 0.01)
        else:
            pytest.fail(f"{pid} is left")


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("forks.DEVICE_FILES = ()", "there is no device that takes long to reach"),
        ("threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "other threads run"),
        ("torch.cuda.is_initialized = lambda: True", "this process uses a device"),
        ("torch.set_default_dtype(torch.bfloat16)", "the program has changed settings of torch"),
        ("torch.set_default_device('meta')", "the program has changed settings of torch"),
        ("torch.set_float32_matmul_precision('high')", "the program has changed settings of torch"),
        ("torch.use_deterministic_algorithms(True)", "the program has changed settings of torch"),
        ("mode = torch.inference_mode(); mode.__enter__()", "the program has changed settings of torch"),
        ("del os.fork", "this system does not fork"),
    ],
)
def test_what_is_not_forked(before: str, reason: str) -> None:
    program(f"""
assert forks.why_not() == ""
{before}
assert forks.why_not() == "{reason}", forks.why_not()
with forked_workers():
    assert forks.fork() is None
os._exit(0)
""")
