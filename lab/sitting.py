"""A list of programs on a device, or several: those that share one run beside each other, those whose times count have it alone.

    python -m lab.sitting lab/sittings/hopper.toml --folder /tmp/sitting --seconds 1500

The file has a table for each job, in the order in which they begin where they can:

    [[job]]
    name = "proofs"
    run = "kernelbench prove --out $FOLDER/proofs.json"   # by bash
    use = "shared"              # "host": without the device; "alone": nothing runs beside it
    seconds = 300               # after which it is ended; with less time left than this it does not begin
    least = 60                  # it begins with so much time left, too, and ends with it
    memory = 10                 # GB of the device's memory
    threads = 2                 # of each of its processes; by default the cores divided by --at-once, at most 8
    needs = ["tests"]           # jobs that must have ended well
    files = ["$PEERS/vllm"]     # files that must exist

    [[job]]
    name = "llama"
    run = "python -m lab.engine_turns ... --ready-file {ready} --start-file {start}"
    use = "alone"
    load = 300                  # seconds for what comes before {start}
    memory = 80
    seconds = 120

What shares the device begins whenever nothing has it alone, so those that have it alone come when the others have ended. A program with {start}
in its command loads beside others, makes the file {ready}, and waits for the file {start}, which is made when it has the
device alone. While one that has loaded waits, nothing else begins there.

Libraries take all cores for each process otherwise: `threads` is the value of `THREADS` in a job's environment, unless they have one in that of this
program, or the command sets them. $FOLDER is the folder of --folder. NAME.log there has what a job prints, state.json how all stand: over the same
folder, jobs that ended well do not run again.

With --devices N a job gets the first of N devices on which it can begin, by CUDA_VISIBLE_DEVICES. Memory, --at-once and being alone are of a device;
jobs of all of them share the cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import click

from gristmill import console
from gristmill.bench import result_file

USES = ("host", "shared", "alone")
POLL, GRACE = 0.1, 10.0
"""Seconds between two looks at the jobs, and between asking a job to end and ending it."""
THREADS, MOST_THREADS = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS", "MAX_JOBS"), 8
"""Environment variables that say how many threads or compilers a process may have, and the most that a job has by default."""


class SittingError(ValueError):
    """A list of jobs that cannot run as it is."""


@dataclass(frozen=True)
class Job:
    """A job, by the names of its table; `command` is `run`. least: None = seconds. threads: None = those of the sitting."""

    name: str
    command: str
    use: str
    seconds: float
    least: float | None = None
    load: float = 0.0
    memory: float = 0.0
    threads: int | None = None
    needs: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def loads(self) -> bool:
        """Whether it waits for {start} when it has loaded."""
        return "{start}" in self.command


def jobs_of(text: str) -> list[Job]:
    """The jobs of a file. SittingError: it is no such file, or says what nothing can fulfil."""
    try:
        tables = tomllib.loads(text).get("job", [])
    except tomllib.TOMLDecodeError as error:
        raise SittingError(f"no TOML: {error}") from error
    known = {"run" if one.name == "command" else one.name for one in fields(Job)}
    jobs: list[Job] = []
    for place, table in enumerate(tables, 1):
        name = table.get("name", f"job {place}")
        if missing := sorted({"name", "run", "use", "seconds"} - {*table}):
            raise SittingError(f"{name} lacks {', '.join(missing)}")
        if unknown := sorted({*table} - known):
            raise SittingError(
                f"{name} has {', '.join(unknown)}, which no job has; there are {', '.join(sorted(known))}"
            )
        if table["use"] not in USES:
            raise SittingError(f"{name}: use is one of {', '.join(USES)}, not {table['use']!r}")
        wrong = [key for key in ("seconds", "least", "load", "memory") if not _is_number(table.get(key, 0))]
        if wrong:
            raise SittingError(f"{name}: {', '.join(wrong)} must be a number of at least 0")
        threads = table.get("threads", 1)
        if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
            raise SittingError(f"{name}: threads must be a whole number of at least 1")
        lists: dict[str, Any] = {key: tuple(table[key]) for key in ("needs", "files") if key in table}
        rest = {key: value for key, value in table.items() if key != "run" and key not in lists}
        job = Job(command=table["run"], **rest, **lists)
        if job.loads and (job.use != "alone" or "{ready}" not in job.command or job.load <= 0):
            raise SittingError(f'{name} waits for {{start}}: it needs {{ready}}, use = "alone", and load')
        if absent := sorted({*job.needs} - {one.name for one in jobs}):
            raise SittingError(f"{name} needs {', '.join(absent)}, which do not come before it")
        if any(one.name == name for one in jobs):
            raise SittingError(f"there are two jobs {name}")
        jobs.append(job)
    return jobs


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


@dataclass
class State:
    """How a job stands: waiting, loading, loaded, running, and in the end done, failed or dropped, with the reason."""

    job: Job
    stands: str = "waiting"
    why: str = ""
    seconds: float = 0.0
    device: int = 0
    began: float = 0.0
    limit: float = 0.0
    asked: float | None = None
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def ended(self) -> bool:
        """Whether it will not run any more."""
        return self.stands in ("done", "failed", "dropped")


class Sitting:
    """The jobs of a list in one folder.

    Args:
        seconds: after which every job is ended.
        memory: GB that the jobs together may take of a device.
        at_once: jobs that run beside each other on a device at most, without those that have loaded.
        devices: how many there are.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        folder: Path,
        seconds: float,
        memory: float,
        at_once: int,
        devices: int = 1,
    ) -> None:
        if large := [job.name for job in jobs if job.memory > memory]:
            raise SittingError(f"{', '.join(large)} takes more memory than the {memory:g} GB of --memory")
        self.folder, self.memory, self.at_once, self.devices = folder, memory, at_once, devices
        self.threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // (at_once * devices)))
        self.began = time.monotonic()
        self.end = self.began + seconds
        folder.mkdir(parents=True, exist_ok=True)
        before = self._before()
        self.states = [State(job, "done" if before.get(job.name) == "done" else "waiting") for job in jobs]

    def run(self) -> bool:
        """Run what can run; whether every job has ended well. Nothing of them is left afterwards."""
        try:
            while not all(state.ended for state in self.states):
                for state in self.states:
                    self._look(state)
                for state in self.states:
                    self._begin_if_it_can(state)
                if not any(map(self._in_progress, range(self.devices))) and self._nothing_can_begin():
                    break
                time.sleep(POLL)
        finally:
            for state in self.states:
                _signal(state, signal.SIGKILL)
                if state.process is not None:
                    state.process.wait()
                if not state.ended:
                    self._stands(state, "dropped", state.why or "its time did not come")
        return all(state.stands == "done" for state in self.states)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def _look(self, state: State) -> None:
        """What has become of a job that has begun."""
        if state.process is None or state.ended:
            return
        now = time.monotonic()
        state.seconds = now - state.began
        if state.stands == "loading" and self._file(state, "ready").exists():
            self._stands(state, "loaded")
        code = state.process.poll()
        if code is not None:
            _signal(state, signal.SIGKILL)  # what it has left behind
            end = f"exit status {code}" if not state.why else state.why
            self._stands(state, "done" if code == 0 and not state.why else "failed", "" if code == 0 else end)
        elif state.asked is not None:
            if now - state.asked > GRACE:
                _signal(state, signal.SIGKILL)
        elif (now > state.limit and state.stands != "loaded") or now > self.end:
            state.why, state.asked = f"ended after {state.seconds:.0f} seconds, {state.stands}", now
            _signal(state, signal.SIGTERM)

    def _begin_if_it_can(self, state: State) -> None:
        job, by_name = state.job, {other.job.name: other for other in self.states}
        if state.stands == "loaded":
            if not self._in_progress(state.device):
                self._file(state, "start").touch()
                state.limit = time.monotonic() + min(job.seconds, self.left)
                self._stands(state, "running")
            return
        if state.stands != "waiting":
            return
        if failed := [name for name in job.needs if by_name[name].stands in ("failed", "dropped")]:
            self._stands(state, "dropped", f"{', '.join(failed)} did not end well")
            return
        waits = [name for name in job.needs if not by_name[name].ended]
        waits += [name for name in job.files if not Path(self._expanded(name)).exists()]
        state.why = f"waits for {', '.join(waits)}" if waits else ""
        if waits or self.left < self._least(job):
            return
        for device in range(self.devices):
            if self._fits(job, device):
                state.device = device
                self._start(state, *(("loading", job.load) if job.loads else ("running", job.seconds)))
                return

    def _fits(self, job: Job, device: int) -> bool:
        """Whether a job may begin on a device beside those that are there, none of which waits to have it alone."""
        here = [
            one for one in self.states if one.process is not None and not one.ended and one.device == device
        ]
        busy = self._in_progress(device)
        if sum(one.job.memory for one in here) + job.memory > self.memory or len(busy) >= self.at_once:
            return False
        if any(one.stands == "loaded" for one in here):
            return False
        if job.use == "alone" and not job.loads:
            return not busy
        return not any(one.stands == "running" and one.job.use == "alone" for one in busy)

    def _in_progress(self, device: int) -> list[State]:
        return [one for one in self.states if one.stands in ("loading", "running") and one.device == device]

    def _nothing_can_begin(self) -> bool:
        """Whether no job that waits will find what it waits for: too little time is left."""
        return all(
            state.ended or (state.stands == "waiting" and self.left < self._least(state.job))
            for state in self.states
        )

    @staticmethod
    def _least(job: Job) -> float:
        return job.load + (job.seconds if job.least is None else job.least)

    def _start(self, state: State, stands: str, limit: float) -> None:
        job = state.job
        command = job.command
        for name in ("ready", "start"):
            self._file(state, name).unlink(missing_ok=True)
            command = command.replace(f"{{{name}}}", str(self._file(state, name)))
        with (self.folder / f"{job.name}.log").open("w") as log:
            state.process = subprocess.Popen(
                ["bash", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self._environment(state),
            )
        state.began = time.monotonic()
        state.limit = state.began + min(limit, self.left)
        self._stands(state, stands)

    def _environment(self, state: State) -> dict[str, str]:
        """That of this program, with the job's device, and its threads, which wait without taking a core."""
        threads = dict.fromkeys(THREADS, str(state.job.threads or self.threads))
        own = {"FOLDER": str(self.folder)}
        if self.devices > 1:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            own["CUDA_VISIBLE_DEVICES"] = visible[state.device] if visible[0] else str(state.device)
        return threads | {"OMP_WAIT_POLICY": "passive"} | os.environ | own

    def _stands(self, state: State, stands: str, why: str = "") -> None:
        state.stands, state.why = stands, why
        where = f"device {state.device} " if self.devices > 1 else ""
        print(
            f"{time.monotonic() - self.began:7.1f} s  {state.job.name:24} {stands:8} {where}{why}".rstrip(),
            flush=True,
        )
        rows = [
            {"name": one.job.name, "stands": one.stands, "seconds": round(one.seconds, 1), "why": one.why}
            for one in self.states
        ]
        result_file.replace(self.folder / "state.json", json.dumps(rows, indent=1) + "\n")

    def _before(self) -> Mapping[str, str]:
        file = self.folder / "state.json"
        rows: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
        return {row["name"]: row["stands"] for row in rows}

    def _file(self, state: State, what: str) -> Path:
        return self.folder / f"{state.job.name}.{what}"

    def _expanded(self, name: str) -> str:
        return os.path.expandvars(name.replace("$FOLDER", str(self.folder)))


def _signal(state: State, number: signal.Signals) -> None:
    """To a job and all its children."""
    if state.process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(state.process.pid, number)


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True))
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Of logs and results.")
@click.option("--seconds", type=float, default=1800.0, show_default=True, help="For all jobs together.")
@click.option("--memory", type=float, default=130.0, show_default=True, help="GB of a device for jobs.")
@click.option("--at-once", type=click.IntRange(1), default=4, show_default=True, help="Jobs that share one.")
@click.option("--devices", type=click.IntRange(1), default=1, show_default=True, help="How many to use.")
@click.option("--list", "listed", is_flag=True, help="Show the jobs, and run nothing.")
@click.option("--only", help="Names of jobs, by commas; what they need is left out unless it is named.")
def main(
    file: Path,
    folder: Path,
    seconds: float,
    memory: float,
    at_once: int,
    devices: int,
    listed: bool,
    only: str | None,
) -> None:
    """Run the jobs of a file."""
    visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    if visible and devices > len(visible):
        raise click.UsageError(f"--devices {devices}: CUDA_VISIBLE_DEVICES has {len(visible)}")
    try:
        jobs = jobs_of(file.read_text())
        if only is not None:
            jobs = _named(jobs, only.split(","))
        if listed:
            _show(jobs)
            return
        sitting = Sitting(jobs, folder.absolute(), seconds, memory, at_once, devices)
    except SittingError as error:
        raise click.UsageError(str(error)) from error
    signal.signal(signal.SIGTERM, _interrupt)
    good = sitting.run()
    rows = [[s.job.name, s.stands, f"{s.seconds:.0f}", s.why] for s in sitting.states]
    console.table("Jobs", ("job", "", "seconds", "why"), rows, right=("seconds",))
    raise SystemExit(0 if good else 1)


def _show(jobs: Sequence[Job]) -> None:
    rows = [
        [job.name, job.use, f"{job.load:g}", f"{job.seconds:g}", f"{job.memory:g}", ", ".join(job.needs)]
        for job in jobs
    ]
    columns = ("job", "use", "load", "seconds", "memory", "needs")
    console.table("Jobs", columns, rows, right=("load", "seconds", "memory"))


def _interrupt(*_: object) -> None:
    """End the jobs, too, when this process is asked to end."""
    raise KeyboardInterrupt


def _named(jobs: Sequence[Job], names: Sequence[str]) -> list[Job]:
    if unknown := sorted({*names} - {job.name for job in jobs}):
        raise SittingError(f"no jobs {', '.join(unknown)}; there are {', '.join(job.name for job in jobs)}")
    return [
        replace(job, needs=tuple(n for n in job.needs if n in names)) for job in jobs if job.name in names
    ]


if __name__ == "__main__":
    main()
