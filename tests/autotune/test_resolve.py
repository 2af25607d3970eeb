"""Resolution with a real child process: records, quarantine of wrong and of crashing kernels, damaged stores."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gristmill.autotune import resolve
from gristmill.autotune.device import device_target
from gristmill.autotune.errors import UnverifiableError
from gristmill.autotune.mark import Mark
from gristmill.autotune.resolve import Resolver, _Writer, confirmed_build
from gristmill.autotune.worker import Worker, Workers
from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import Registry, default_registry
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.select import Selection
from gristmill.kernel_registry.store import Store, Verification, config_key, target_key
from gristmill.kernel_registry.target import Target
from tests import forked

OP = default_registry().op("rms_norm")
PROBLEM = OP.problem("m=4,n=64,x=fp32")

SPEC = """
import os
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.requirement import Requirement
def wrong(config, call): call.out.zero_()
def crash(config, call): os.kill(os.getpid(), 11)
KERNELS = [Kernel(op="rms_norm", name=f"rms_norm_{f.__name__}", provider="test", language="python", priority=p,
                  target=f"{__name__}:{f.__name__}", requires=Requirement()) for f, p in ((wrong, 900), (crash, 800))]
"""

RUN = """
import json, sys, warnings
warnings.simplefilter("always")
from gristmill.autotune.resolve import Resolver
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
op = default_registry().op("rms_norm")
selection = Resolver("cpu", Policy(cache=sys.argv[1])).resolve(op, op.problem("m=4,n=64,x=fp32"))
print(json.dumps([c.as_dict() for c in selection.candidates]))
"""


def run_with_bad_kernels(tmp_path: Path) -> tuple[dict[str, dict], str]:
    """Resolves in a process in which two bad kernels outrank the good ones."""
    extra = tmp_path / "extra"
    extra.mkdir(exist_ok=True)
    (extra / "rms_norm_bad.py").write_text(SPEC)
    added = f"import gristmill.kernels.norm as family\nfamily.__path__.append({str(extra)!r})\n"
    (tmp_path / "sitecustomize.py").write_text(added)  # for the processes that verify
    process = forked.run("-c", added + RUN, str(tmp_path / "cache"), path=(tmp_path,))
    assert process.returncode == 0, process.stderr
    return {row["kernel"]: row for row in json.loads(process.stdout)}, process.stderr


def test_wrong_and_crashing_kernels_are_quarantined_and_the_next_one_runs(tmp_path: Path) -> None:
    rows, warned = run_with_bad_kernels(tmp_path)
    assert rows["rms_norm_wrong"]["verdict"] == rows["rms_norm_crash"]["verdict"] == "quarantined"
    assert "over the tolerance" in rows["rms_norm_wrong"]["reasons"][0]
    assert "killed its process" in rows["rms_norm_crash"]["reasons"][0]
    assert [row["kernel"] for row in rows.values() if row["verdict"] == "selected"] in (
        ["rms_norm_cpu"],
        ["rms_norm_torch"],
    )
    assert "quarantined" in warned
    second_rows, warned = run_with_bad_kernels(tmp_path)
    assert second_rows == rows and "quarantined" not in warned, "records are kept: nothing is verified twice"


def test_a_verified_kernel_is_not_verified_again(tmp_path: Path) -> None:
    class Refuses(Worker):
        def verify(self, *arguments: object) -> dict[str, object]:  # type: ignore[override]
            raise AssertionError("verified twice")

    policy = Policy(cache=str(tmp_path))
    first = Resolver("cpu", policy).resolve(OP, PROBLEM).require()
    assert first.verdict == "selected"
    assert (
        Resolver("cpu", policy, worker=Refuses()).resolve(OP, PROBLEM).require().kernel.name
        == first.kernel.name
    )


def test_a_kernel_registered_later_is_selected(tmp_path: Path) -> None:
    """The checks of hardware and build are remembered for the kernels that there are."""
    registry = default_registry().copy()
    resolver = Resolver("cpu", Policy(cache=str(tmp_path)), registry)
    assert "rms_norm_late" not in {c.kernel.name for c in resolver.select(OP, PROBLEM).candidates}
    registry.add(
        dataclasses.replace(registry.kernel("rms_norm", "rms_norm_torch"), name="rms_norm_late", priority=999)
    )
    best = resolver.select(OP, PROBLEM).best
    assert best is not None and best.kernel.name == "rms_norm_late"


def test_a_damaged_store_is_left_alone_with_one_warning(tmp_path: Path) -> None:
    policy = Policy(cache=str(tmp_path))
    policy.store_path.write_text('{"schema": 1,\n"verified": [{}\n')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resolver = Resolver("cpu", policy)
        assert [resolver.resolve(OP, OP.problem(f"m={m},n=64,x=fp32")).require().verdict for m in (4, 8)] == [
            "selected"
        ] * 2
    assert len(caught) == 1 and re.search(
        r"store.json: line \d+.*nothing will be recorded", str(caught[0].message)
    )
    assert policy.store_path.read_text().startswith('{"schema": 1,\n"verified": [{}')


WRITER = """
import sys
import warnings
from pathlib import Path
from gristmill.autotune.store import save
from gristmill.kernel_registry.store import Timing
for index in range(20):
    save(Path(sys.argv[1]), [Timing(op="o", kernel=f"k{sys.argv[2]}", code="", config={}, problem=f"m={index}", target="t",
                                    toolchain="", us=1.0)])
"""


def test_eight_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, sys.path))
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "store.json"), str(number)],
            env={**os.environ, "PYTHONPATH": path},
        )
        for number in range(8)
    ]
    assert [writer.wait() for writer in writers] == [0] * 8
    assert len(json.loads((tmp_path / "store.json").read_text())["timed"]) == 160


def test_a_policy_level_is_the_level_that_runs(tmp_path: Path) -> None:
    resolver = Resolver("cpu", Policy(cache=str(tmp_path), cpu_level="base"))
    candidate = resolver.resolve(OP, PROBLEM).require()
    assert resolver.target.name == "cpu:base"
    if candidate.kernel.language == "cpp":
        assert candidate.config is not None and candidate.config["level"] == "base"


class Recording(Worker):
    """A worker that returns a given answer and starts no process."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer = answer

    def verify(self, *arguments: object) -> dict[str, object]:  # type: ignore[override]
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer  # type: ignore[return-value]


@pytest.fixture
def h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[object], Resolver]:
    """Resolvers for a GPU that is not present, over one store, with a worker that returns a given answer."""
    monkeypatch.setattr(
        "gristmill.autotune.resolve.device_target", lambda device, policy: Target.parse("h200")
    )
    return lambda answer: Resolver(
        "cuda", Policy(cache=str(tmp_path)), build=Build.of({"torch": "2.13.0"}), worker=Recording(answer)
    )


RIGHT = {"ok": True, "error": 0.0, "reason": "", "judged": True}


def test_an_interrupted_verification_leaves_no_mark(h200: Callable[[object], Resolver]) -> None:
    """On a GPU a mark exists while a kernel is verified. A crash leaves it, an interrupt must not."""
    resolver = h200(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        resolver.resolve(OP, PROBLEM)
    assert not resolver.store.verifications and not Store.read(resolver.policy.store_path).verifications
    resolver.workers = Workers(Recording(RIGHT))
    resolved = resolver.resolve(OP, PROBLEM)
    assert resolved.best is not None and resolved.best.verdict == "selected"
    assert [v.ok for v in Store.read(resolver.policy.store_path).verifications.values()] == [True]


def test_what_is_not_the_kernels_fault_is_raised_and_not_recorded(h200: Callable[[object], Resolver]) -> None:
    """A device without free memory proves nothing about the kernel, which must not be quarantined for good."""
    resolver = h200({"ok": False, "error": None, "reason": "got no memory", "judged": False})
    with pytest.raises(
        UnverifiableError, match="cannot be verified on cuda, and was not recorded: got no memory"
    ):
        resolver.resolve(OP, PROBLEM)
    assert not resolver.store.verifications and not Store.read(resolver.policy.store_path).verifications


def test_the_worker_tells_its_own_troubles_from_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that cannot make the arguments of a far too large problem stays alive and does not blame the
    kernel."""
    worker, kernel = Worker(), default_registry().kernel("rms_norm", "rms_norm_torch")
    answer = worker.verify(OP, kernel, {}, PROBLEM.with_values(m=1 << 40, n=1 << 20), "cpu")
    assert answer["judged"] is False and "the reference of rms_norm" in answer["reason"]
    assert worker.verify(OP, kernel, {}, PROBLEM, "cpu")["ok"]
    worker.close()


TRY = """
import sys, time
from pathlib import Path
from gristmill.autotune.mark import Mark
from gristmill.kernel_registry.store import Store, Verification
record = Verification("rms_norm", *sys.argv[2:8], ok=False, reason="trying: the process ended before the verification did")
with Mark(Path(sys.argv[1])).trial(record, 1.0) as left:
    print(left, flush=True)
    time.sleep(float(sys.argv[8]))
"""


def another_process_tries(resolver: Resolver, kernel: str, seconds: float) -> subprocess.Popen[str]:
    """Starts a process that holds the mark for `seconds`."""
    candidate = next(c for c in resolver.select(OP, PROBLEM).candidates if c.kernel.name == kernel)
    key = (
        kernel,
        candidate.kernel.verification_hash(candidate.config),
        config_key(candidate.config or {}),
        str(OP.verification(PROBLEM, candidate.kernel, candidate.config or {})),
        target_key(resolver.target),
        resolver.build.key(),
    )
    path = resolver.policy.store_path
    other = subprocess.Popen(
        [sys.executable, "-c", TRY, str(path.with_name(path.name + ".trying")), *key, str(seconds)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None and other.stdout.readline() == "()\n"
    return other


def test_a_mark_of_a_dead_process_quarantines(h200: Callable[[object], Resolver]) -> None:
    resolver = h200(RIGHT)
    best = resolver.select(OP, PROBLEM).candidates[0].kernel.name
    dead = another_process_tries(resolver, best, 60)
    dead.kill()
    dead.wait()
    with pytest.warns(RuntimeWarning, match=f"{best} is quarantined .*ended before the verification did"):
        resolved = resolver.resolve(OP, PROBLEM)
    assert resolved.best is None or resolved.best.kernel.name != best
    candidate = next(c for c in h200(RIGHT).select(OP, PROBLEM).candidates if c.kernel.name == best)
    assert candidate.verdict == "quarantined", "the mark did not reach the store"


def test_a_mark_of_a_living_process_is_waited_for(h200: Callable[[object], Resolver]) -> None:
    """Another process is verifying the kernel, which is no failure of the kernel."""
    resolver = h200(RIGHT)
    best = resolver.select(OP, PROBLEM).candidates[0].kernel.name
    living = another_process_tries(resolver, best, 0.5)
    resolved = resolver.resolve(OP, PROBLEM)
    assert living.wait() == 0
    assert resolved.best is not None and (resolved.best.kernel.name, resolved.best.verdict) == (
        best,
        "selected",
    )


def test_trials_that_died_together_are_made_again_one_by_one(
    h200: Callable[[object], Resolver], tmp_path: Path
) -> None:
    """Which of several kernels brought the machine down is not known, so none is quarantined, and they are tried alone."""
    resolver = h200(RIGHT)
    names = [c.kernel.name for c in resolver.select(OP, PROBLEM).candidates][:2]
    trials = [
        Verification(OP.name, name, "", "", "", "h200", "", ok=False, reason="trying") for name in names
    ]
    path = resolver.policy.store_path
    path.with_name(path.name + ".trying").write_text(
        json.dumps([dataclasses.asdict(trial) for trial in trials])
    )
    problems = [(OP, OP.problem(f"m=4,n={n},x=fp32"), None) for n in (64, 128, 256)]
    together = Together(1)
    resolver.workers = Workers(together)
    with pytest.warns(
        RuntimeWarning, match="ended while it verified 2 kernels at a time: kernels are verified one by one"
    ):
        resolver.resolve_all(problems, 3)
    assert together.most == 1 and len(resolver.store.verifications) == 3
    assert all(record.ok for record in resolver.store.verifications.values())


class Together(Worker):
    """A worker that answers when `count` verifications wait for it, or after a minute; it starts no process."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.barrier = threading.Barrier(count)
        self.running = self.most = self.calls = 0
        self.lock = threading.Lock()

    def verify(self, *arguments: object) -> dict[str, object]:  # type: ignore[override]
        with self.lock:
            self.calls += 1
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            self.barrier.wait(60)
        finally:
            with self.lock:
                self.running -= 1
        return RIGHT


def test_what_died_is_not_asked_for_during_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this process: to take its lock again would wait for itself. Of another one, which holds it for as long as it verifies: its beginning has
    read what was left, and an engine that starts beside it with nothing to verify does not wait."""
    mark = Mark(tmp_path / "trying")
    record = Verification(OP.name, "k", "", "", "", "h200", "", ok=False, reason="trying")
    with mark.trial(record, 0.1):
        assert mark.left() == ()
        assert len(json.loads(mark.path.read_text())) == 1
    assert mark.left() == () and mark.path.read_text() == ""
    with mark.path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(json.dumps(dataclasses.asdict(record)))
        other.flush()
        monkeypatch.setattr("gristmill.autotune.mark.POLL", None)  # what waits for a lock fails
        assert mark.left() == ()
        assert json.loads(mark.path.read_text())["kernel"] == "k"
    assert [one.kernel for one in mark.left()] == ["k"] and mark.left() == ()


def test_as_many_verifications_run_at_a_time_as_are_allowed(
    h200: Callable[[object], Resolver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of four waits for another one. The mark names those that run, and is empty when the last one has ended."""
    together, resolver, marked, done = Together(2), h200(RIGHT), [], []
    monkeypatch.setattr("gristmill.autotune.worker.Worker", lambda timeout: together)
    write = Mark._write

    def written(mark: Mark) -> None:
        write(mark)
        marked.append(len(json.loads(mark.path.read_text())))

    monkeypatch.setattr(Mark, "_write", written)
    resolver.workers = Workers(together)
    resolver.resolve_all(
        [(OP, OP.problem(f"m=4,n={n},x=fp32"), None) for n in (64, 128, 256, 512)], 2, done.append
    )
    assert together.most == 2 and len(resolver.store.verifications) == 4 and sorted(done) == [1, 2, 3, 4]
    assert max(marked) == 2 and resolver._mark.path.read_text() == ""


def test_two_threads_verify_a_kernel_once(h200: Callable[[object], Resolver]) -> None:
    together, resolver = Together(1), h200(RIGHT)
    resolver.workers = Workers(together)
    resolver.resolve_all([(OP, PROBLEM, None)] * 5, 3)
    assert together.calls == 1 == len(resolver.store.verifications)


def test_what_another_process_has_verified_meanwhile_is_read(h200: Callable[[object], Resolver]) -> None:
    """Replicas start together, each with an empty store; the second one finds the records of the first, whatever it said."""
    first, second = (
        h200(RIGHT),
        h200({"ok": False, "error": None, "reason": "verified twice", "judged": True}),
    )
    third = h200(RIGHT)
    made = first.resolve(OP, PROBLEM).best
    assert second.resolve(OP, PROBLEM).best == made and second.tried == 0
    other = OP.problem("m=4,n=128,x=fp32")
    with pytest.warns(RuntimeWarning, match="verified twice"):
        second.resolve(OP, other)
    assert third.resolve(OP, PROBLEM).best == made
    assert third.resolve(OP, other).best is None and third.tried == 0, "what failed there is quarantined here"


def test_what_cannot_be_verified_beside_others_is_left(h200: Callable[[object], Resolver]) -> None:
    resolver = h200({"ok": False, "error": None, "reason": "got no memory", "judged": False})
    resolver.resolve_all([(OP, PROBLEM, None)], 2)
    assert not resolver.store.verifications
    with pytest.raises(UnverifiableError, match="got no memory"):
        resolver.resolve(OP, PROBLEM)


def test_a_candidate_that_was_verified_since_it_was_selected_is_not_verified_again(tmp_path: Path) -> None:
    """As by another thread between the two."""
    resolver = Resolver("cpu", Policy(cache=str(tmp_path)))
    op = resolver.registry.op("rms_norm")
    problem = op.problem("m=1,n=32,x=fp32")
    candidate = resolver.select(op, problem).require()
    first, again = (resolver.verify(op, problem, candidate) for _ in range(2))
    assert first.ok and again is first and resolver.tried == 1


def test_a_patient_thread_lets_others_go_first() -> None:
    """It waits while they wait, though it was there first; without them it gets a worker."""
    workers, order = Workers(), list[str]()

    def patient() -> None:
        workers.be_patient()
        with workers.one():
            order.append("patient")

    def other() -> None:
        with workers.one():
            order.append("other")

    with workers.one():
        threads = [threading.Thread(target=patient), *(threading.Thread(target=other) for _ in range(3))]
        for waiting, thread in enumerate(threads):
            thread.start()
            while len(workers._changed._waiters) <= waiting:  # type: ignore[attr-defined]
                time.sleep(0.001)
    for thread in threads:
        thread.join(60)
    assert order == ["other"] * 3 + ["patient"]


def test_one_worker_is_left() -> None:
    """While more are allowed others start; afterwards their processes have ended, also of those that were busy."""
    workers, kernel = Workers(), default_registry().kernel("rms_norm", "rms_norm_torch")
    with workers.allow(2), workers.one() as first:
        with workers.one() as second:
            assert first is not second and second.verify(OP, kernel, {}, PROBLEM, "cpu")["ok"]
        process = second._process
        assert process is not None and process.poll() is None
    assert process.poll() is not None
    with workers.one() as again:
        assert again is workers.first
    with ExitStack() as allowed, ExitStack() as busy:
        allowed.enter_context(workers.allow(2))
        with workers.allow(3):
            assert workers.limit == 3
            held = [busy.enter_context(workers.one()) for _ in range(3)]
        assert workers.limit == 2, "another thread allows two"
        allowed.close()
        assert workers.limit == 1
    assert workers._idle == [workers.first] and workers.first in held
    workers.first.close()


def test_a_mark_that_is_held_for_ever_is_an_error(h200: Callable[[object], Resolver]) -> None:
    resolver = h200(RIGHT)
    resolver.workers.first.timeout = 0.1
    other = another_process_tries(resolver, resolver.select(OP, PROBLEM).candidates[0].kernel.name, 60)
    with pytest.raises(TimeoutError, match="another process has been verifying kernels for"):
        resolver.resolve(OP, PROBLEM)
    other.kill()
    other.wait()


def test_a_large_store_is_not_written_for_every_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records wait while writing is expensive; failures are written at once; the end of the process writes
    the rest."""
    written: list[int] = []

    def slow(path: Path, records: Sequence[Verification]) -> None:
        written.append(len(records))
        now[0] += 0.5

    now = [0.0]
    monkeypatch.setattr("gristmill.autotune.resolve.save", slow)
    monkeypatch.setattr("gristmill.autotune.resolve.time.monotonic", lambda: now[0])
    writer = _Writer(tmp_path / "store.json")
    record = Verification("o", "k", "", "", "", "t", "", ok=True)
    for _ in range(100):
        now[0] += 0.25
        writer.add(record)
    assert len(written) == 3 and written[0] == 1 and 0.5 * len(written) < now[0] / 15
    before = len(writer.waiting)
    writer.add(dataclasses.replace(record, ok=False))
    assert written[-1] == before + 1 and not writer.waiting
    writer.add(record)
    assert writer.waiting
    del writer
    assert written[-1] == 1


def test_records_that_arrive_during_a_write_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several verifications end at a time, and each writes what waits."""
    written: list[str] = []
    records = [Verification("o", f"k{i}", "", "", "", "t", "", ok=True) for i in range(4)]

    def save(path: Path, given: Sequence[Verification]) -> None:
        taken = [record.kernel for record in given]
        if records:
            writer.waiting.append(records.pop())  # by another thread, while this one writes
        written.extend(taken)

    monkeypatch.setattr("gristmill.autotune.resolve.save", save)
    writer = _Writer(tmp_path / "store.json")
    writer.add(records.pop())
    for _ in range(4):
        writer.flush()
    assert sorted(written) == ["k0", "k1", "k2", "k3"]


def test_the_end_of_a_process_writes_what_waits(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from gristmill.autotune.resolve import _Writer; "
        "from gristmill.kernel_registry.store import Verification; writer = _Writer(Path(sys.argv[1])); writer.due = 1e9 * 1e9; "
        "writer.add(Verification('o', 'k', '', '', '', 't', '', ok=True)); assert not Path(sys.argv[1]).exists()"
    )
    assert forked.run("-c", code, str(tmp_path / "store.json")).returncode == 0
    assert len(Store.read(tmp_path / "store.json").verifications) == 1


def test_an_interrupted_or_faulted_worker_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late answer must not count as that of the next task, nor a broken device context as a fault of the
    next kernel."""
    worker, kernel = Worker(), default_registry().kernel("rms_norm", "rms_norm_torch")
    assert worker.verify(OP, kernel, {}, PROBLEM, "cpu")["ok"]
    first = worker._process

    def interrupt(timeout: float) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(worker._answers, "get", interrupt)
    with pytest.raises(KeyboardInterrupt):
        worker.verify(OP, kernel, {}, PROBLEM, "cpu")
    assert worker._process is None and first is not None and first.poll() is not None
    process = Fake()
    monkeypatch.setattr(worker, "_alive", lambda: process)
    worker._process = process  # type: ignore[assignment]
    worker._answers = queue.Queue()
    worker._answers.put(
        json.dumps({"ok": False, "error": None, "tolerance": 1.0, "reason": "illegal memory access"})
    )
    assert worker.verify(OP, kernel, {}, PROBLEM, "cuda:0")["reason"] == "illegal memory access"
    assert worker._process is None and process.killed


class Fake:
    """Stands in for the child process."""

    def __init__(self) -> None:
        self.stdin, self.killed = io.StringIO(), False

    def kill(self) -> None:
        self.killed = True

    def wait(self) -> int:
        return 0


@pytest.mark.parametrize("device", ["mps", "cuda:x", "cuda:-1", ""])
def test_a_device_that_is_none_is_named(device: str) -> None:
    with pytest.raises(ValueError, match="expected cpu, cuda, xpu"):
        device_target(device, Policy())


def test_devices_are_counted_by_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = tuple(map(Target.parse, ("xpu:bmg", "gfx1100", "sm_90", "sm_120")))
    monkeypatch.setattr("gristmill.autotune.device._devices", lambda: mixed)
    assert [device_target(d, Policy()).name for d in ("cuda", "cuda:1", "xpu")] == [
        "sm_90",
        "sm_120",
        "xpu:bmg",
    ]
    with pytest.raises(ValueError, match="2 such"):
        device_target("cuda:2", Policy())
    monkeypatch.setattr("gristmill.autotune.device._devices", lambda: mixed[:2])
    assert device_target("cuda:0", Policy()).name == "gfx1100"


def test_a_pinned_kernel_has_its_module_asked_by_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some modules create their names on import, which reading their source cannot tell."""
    (tmp_path / "gm_lazy.py").write_text("class Wrapper:\n    def plan(self): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry, target = Registry(), Target.parse("sm_90")
    registry.add(OP)
    registry.add(
        Kernel(
            op="rms_norm",
            name="lazy",
            provider="test",
            language="python",
            target="json:dumps",
            requires=Requirement(offers=("gm_lazy:Wrapper.plan",)),
        )
    )
    assert "only an import" in (confirmed_build(registry, target).why_not_offer("gm_lazy:Wrapper.plan") or "")
    pinned = confirmed_build(registry, target, Policy(pins={"rms_norm": ("lazy",)}))
    assert pinned.why_not_offer("gm_lazy:Wrapper.plan") is None


def test_a_selection_is_made_once_until_a_record_of_its_operation_comes(
    h200: Callable[[object], Resolver], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver, made = h200(RIGHT), list[str]()
    real = resolve.select

    def counted(op: Op, *rest: Any, **named: Any) -> Selection:
        made.append(op.name)
        return real(op, *rest, **named)

    monkeypatch.setattr(resolve, "select", counted)
    other = default_registry().op("silu_and_mul")
    first = resolver.select(OP, PROBLEM)
    assert resolver.select(OP, PROBLEM) is first and made == ["rms_norm"]
    assert resolver.select(OP, PROBLEM.with_values(n=128)).problem["n"] == 128 and len(made) == 2
    resolver.select(other, other.problem("m=4,n=64"))
    assert made[2:] == ["silu_and_mul"]
    resolver.resolve(OP, PROBLEM)  # verifies, which adds a record
    assert made[3:] == ["rms_norm"] and resolver.select(OP, PROBLEM) is not first
    resolver.resolve(OP, PROBLEM)
    resolver.select(other, other.problem("m=4,n=64"))
    assert len(made) == 4, "no record of the other operation has come"
    resolver.policy = replace(resolver.policy, deterministic=True)
    assert resolver.select(OP, PROBLEM) is not first and len(made) == 5
    monkeypatch.setattr(resolve, "MOST_KEPT", 3)
    for n in (64, 72, 80, 88):
        resolver.select(OP, PROBLEM.with_values(n=n))
    assert len(resolver._selected) <= 3


def test_a_kept_selection_waits_for_nobody(h200: Callable[[object], Resolver]) -> None:
    """Another thread selects, and holds the lock: who asks for what is selected already goes on."""
    resolver = h200(RIGHT)
    resolver.resolve(OP, PROBLEM)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with resolver._changed:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    try:
        assert resolver.resolve(OP, PROBLEM).require().kernel.op == "rms_norm"
    finally:
        done.set()
        thread.join()
