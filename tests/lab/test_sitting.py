"""lab.sitting: jobs share a device or have it alone, load before their turn, and end in time. The jobs are shell commands that note when they ran."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from lab.sitting import THREADS, Job, Sitting, SittingError, jobs_of, main


def noting(name: str, use: str, seconds: float = 0.4, **more: object) -> Job:
    """A job that writes when it began and ended."""
    command = f"date +%s.%N >> $FOLDER/{name}.at; sleep {seconds}; date +%s.%N >> $FOLDER/{name}.at"
    return Job(name, command, use, 20.0, **more)  # type: ignore[arg-type]


def meeting(name: str, other: str, use: str = "shared", **more: object) -> Job:
    """A job that ends when it runs beside another one, or has found it."""
    command = (
        f"echo $CUDA_VISIBLE_DEVICES > $FOLDER/{name}.device; date +%s.%N >> $FOLDER/{name}.at; "
        f"until [ -e $FOLDER/{other}.at ]; do sleep 0.02; done; date +%s.%N >> $FOLDER/{name}.at"
    )
    return Job(name, command, use, 30.0, **more)  # type: ignore[arg-type]


def loading(name: str, **more: object) -> Job:
    """A job that loads for a moment, waits for its turn, and notes when that was."""
    command = (
        "sleep 0.2; touch {ready}; until [ -e {start} ]; do sleep 0.02; done; "
        f"date +%s.%N >> $FOLDER/{name}.at; sleep 0.3; date +%s.%N >> $FOLDER/{name}.at"
    )
    return Job(name, command, "alone", 20.0, load=20.0, **more)  # type: ignore[arg-type]


def runs(process: int) -> bool:
    """Whether a process is there that is no zombie, which its new parent may not have waited for yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def run(
    folder: Path, *jobs: Job, seconds: float = 60.0, at_once: int = 4, devices: int = 1
) -> tuple[bool, dict[str, str]]:
    """Whether all ended well, and what state.json says of each."""
    good = Sitting(jobs, folder, seconds, 100.0, at_once, devices).run()
    return good, {row["name"]: row["stands"] for row in json.loads((folder / "state.json").read_text())}


def times(folder: Path, name: str) -> tuple[float, float]:
    begin, end = map(float, (folder / f"{name}.at").read_text().split())
    return begin, end


def overlap(folder: Path, first: str, second: str) -> bool:
    (a, b), (c, d) = times(folder, first), times(folder, second)
    return max(a, c) < min(b, d)


def test_jobs_share_a_device_or_have_it_alone(tmp_path: Path) -> None:
    jobs = [
        meeting("one", "two"),
        meeting("two", "one"),
        noting("quiet", "alone"),
        noting("host", "host"),
        loading("race"),
    ]
    good, stands = run(tmp_path, *jobs)
    assert good and set(stands.values()) == {"done"}
    for alone in ("quiet", "race"):
        assert not any(overlap(tmp_path, alone, other) for other in stands if other != alone), alone


def test_memory_and_the_number_of_jobs_are_bounded(tmp_path: Path) -> None:
    run(tmp_path / "memory", noting("one", "shared", memory=60.0), noting("two", "shared", memory=60.0))
    assert not overlap(tmp_path / "memory", "one", "two")
    run(tmp_path / "number", noting("one", "shared"), noting("two", "shared"), at_once=1)
    assert not overlap(tmp_path / "number", "one", "two")
    with pytest.raises(SittingError, match="large takes more memory than the 100 GB"):
        run(tmp_path, noting("large", "shared", memory=101.0))


def test_nothing_begins_where_a_loaded_job_waits(tmp_path: Path) -> None:
    """`middle` ends when the race has loaded, and `later` could begin beside `long`, which runs on for a second."""
    middle = Job("middle", "until [ -e $FOLDER/race.ready ]; do sleep 0.02; done; sleep 0.5", "shared", 30.0)
    long = Job("long", "until [ -e $FOLDER/race.ready ]; do sleep 0.02; done; sleep 1.5", "shared", 30.0)
    good, _ = run(tmp_path, long, middle, noting("later", "shared", needs=("middle",)), loading("race"))
    assert good and times(tmp_path, "later")[0] >= times(tmp_path, "race")[1]


def test_jobs_have_devices_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are alone and those that are too large for one device run at the same time on two; the devices are those of the environment."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for use in ("alone", "shared"):
        folder, jobs = tmp_path / use, [meeting(*names, use, memory=60.0) for names in ("ab", "ba")]
        assert run(folder, *jobs, devices=2)[0]
        assert {(folder / f"{name}.device").read_text().strip() for name in "ab"} == {"0", "1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert run(tmp_path / "named", meeting("a", "b", "alone"), meeting("b", "a", "alone"), devices=2)[0]
    assert {(tmp_path / "named" / f"{name}.device").read_text().strip() for name in "ab"} == {"4", "7"}
    assert run(tmp_path / "one", meeting("a", "a"))[0]
    assert (tmp_path / "one" / "a.device").read_text().strip() == "4,7"
    file = tmp_path / "jobs.toml"
    file.write_text(GOOD)
    result = CliRunner().invoke(main, [str(file), "--folder", str(tmp_path), "--devices", "3"])
    assert result.exit_code == 2 and "--devices 3: CUDA_VISIBLE_DEVICES has 2" in result.output


def test_a_job_loads_and_runs_on_one_device(tmp_path: Path) -> None:
    """Both load on the first device, where each has its turn alone, while a third has the second device alone."""
    assert run(tmp_path, loading("first"), loading("second"), noting("quiet", "alone"), devices=2)[0]
    assert not overlap(tmp_path, "first", "second")
    assert times(tmp_path, "quiet")[0] < max(times(tmp_path, "first")[0], times(tmp_path, "second")[0])


def test_a_job_that_fails_drops_those_that_need_it(tmp_path: Path) -> None:
    bad = Job("bad", "exit 3", "shared", 20.0)
    good, stands = run(tmp_path, bad, noting("after", "alone", needs=("bad",)), noting("other", "alone"))
    assert not good and stands == {"bad": "failed", "after": "dropped", "other": "done"}
    why = {row["name"]: row["why"] for row in json.loads((tmp_path / "state.json").read_text())}
    assert why["bad"] == "exit status 3" and why["after"] == "bad did not end well"


def test_jobs_end_in_time_and_leave_nothing(tmp_path: Path) -> None:
    """A job is ended after its seconds, with its children; one for which too little time is left does not begin, one that can use less does."""
    endless = Job("endless", "sleep 300 & echo $! > $FOLDER/child; wait", "shared", 3.0)
    long = Job("long", "true", "alone", 100.0)
    short = Job("short", "true", "alone", 100.0, least=1.0)
    began = time.monotonic()
    good, stands = run(tmp_path, endless, long, short, seconds=90.0)
    assert time.monotonic() - began < 60.0
    assert not good and stands == {"endless": "failed", "long": "dropped", "short": "done"}
    assert not runs(int((tmp_path / "child").read_text()))


def test_what_has_ended_well_does_not_run_again(tmp_path: Path) -> None:
    switch = tmp_path / "switch"
    jobs = [noting("one", "shared"), Job("two", f"test -e {switch}", "shared", 20.0)]
    assert run(tmp_path, *jobs)[1] == {"one": "done", "two": "failed"}
    before = times(tmp_path, "one")
    switch.touch()
    assert run(tmp_path, *jobs) == (True, {"one": "done", "two": "done"})
    assert times(tmp_path, "one") == before


def test_a_job_waits_for_its_files(tmp_path: Path) -> None:
    first = Job("first", "sleep 0.3; touch $FOLDER/made", "shared", 20.0)
    assert run(tmp_path, first, noting("second", "shared", files=("$FOLDER/made",)))[0]
    assert times(tmp_path, "second")[0] >= (tmp_path / "made").stat().st_mtime - 0.05


def test_a_job_has_a_bounded_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own number, or its part of the cores; what the environment or the command says comes first."""
    for name in (*THREADS, "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MAX_JOBS", "3")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {*range(32)})
    command = (
        "echo $OMP_NUM_THREADS $TORCHINDUCTOR_COMPILE_THREADS $MAX_JOBS $OMP_WAIT_POLICY > $FOLDER/{}.is"
    )
    jobs = [
        Job("part", command.format("part"), "shared", 20.0),
        Job("own", command.format("own"), "alone", 20.0, threads=1),
        Job("command", "OMP_NUM_THREADS=7 bash -c '" + command.format("command") + "'", "shared", 20.0),
    ]
    said = {"part": "5 5 3 passive", "own": "1 1 3 passive", "command": "7 5 3 passive"}
    assert run(tmp_path, *jobs, at_once=6)[0]
    assert {name: (tmp_path / f"{name}.is").read_text().strip() for name in said} == said
    few, many, two = (Sitting([], tmp_path, 1.0, 1.0, *n).threads for n in ((64,), (1,), (4, 2)))
    assert few == 1 and many == 8 and two == 4


GOOD = '[[job]]\nname = "a"\nrun = "true"\nuse = "host"\nseconds = 5\n'


@pytest.mark.parametrize(
    "text,why",
    [
        ("[[job", "no TOML"),
        (GOOD.replace("seconds = 5\n", ""), "a lacks seconds"),
        (GOOD.replace("host", "gpu"), "use is one of host, shared, alone, not 'gpu'"),
        (GOOD.replace("= 5", '= "5"'), "a: seconds must be a number"),
        (GOOD + "threads = 0\n", "a: threads must be a whole number of at least 1"),
        (GOOD + "minutes = 3\n", "a has minutes, which no job has"),
        (GOOD + 'needs = ["b"]\n', "a needs b, which do not come before it"),
        (GOOD + GOOD, "two jobs a"),
        (GOOD.replace('"true"', '"x {start}"'), "a waits for {start}"),
    ],
)
def test_a_list_that_cannot_run_is_refused(text: str, why: str) -> None:
    with pytest.raises(SittingError, match=why.replace("{", r"\{")):
        jobs_of(text)


def test_the_program_runs_the_named_jobs(tmp_path: Path) -> None:
    file = tmp_path / "jobs.toml"
    file.write_text(GOOD + GOOD.replace('"a"', '"b"').replace("true", "false") + 'needs = ["a"]\n')
    result = CliRunner().invoke(main, [str(file), "--folder", str(tmp_path / "f"), "--only", "b"])
    assert result.exit_code == 1
    assert "b" in result.output and "exit status 1" in result.output and "a  " not in result.output
    result = CliRunner().invoke(main, [str(file), "--folder", str(tmp_path / "f"), "--only", "c"])
    assert result.exit_code == 2 and "no jobs c; there are a, b" in result.output


ROOT = Path(__file__).resolve().parents[2]
LISTS = sorted((ROOT / "lab" / "sittings").glob("*.toml"))


@pytest.mark.parametrize("file", LISTS, ids=lambda file: file.stem)
def test_what_a_list_names_exists(file: Path) -> None:
    """Programs and their options, tests, and suites: a renamed one would be noticed on a rented device otherwise."""
    for job in jobs_of(file.read_text()):
        words = job.command.replace("\\\n", " ").split()
        # What comes before is another program, as compute-sanitizer, which starts it.
        words = words[min(words.index(one) for one in ("python", "kernelbench") if one in words) :]
        for before, word in zip(words, words[1:], strict=False):
            if before == "-m" and word.startswith("lab."):
                module = ROOT / word.replace(".", "/")
                assert module.is_dir() or module.with_suffix(".py").exists(), word
            if before == "--suite":
                assert (ROOT / "bench" / "suites" / f"{word}.json").exists(), word
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), job.name
        named = [word for word in words if word.startswith("--") and len(word) > 2]
        known = _options_of(words)
        assert set(named) <= known, f"{job.name}: {sorted(set(named) - known)}"


@pytest.mark.parametrize("file", LISTS, ids=lambda file: file.stem)
def test_jobs_keep_the_path_of_their_environment(file: Path) -> None:
    """gristmill itself may be found by it. An empty part would be the current folder."""
    for job in jobs_of(file.read_text()):
        for part in re.findall(r"PYTHONPATH=\S*", job.command):
            for before, after in (("/src", "/peers:/src"), ("", "/peers")):
                done = subprocess.run(
                    ["bash", "-c", f"{part} env"],
                    env={"PATH": os.environ["PATH"], "PEERS": "/peers", "PYTHONPATH": before},
                    capture_output=True,
                    text=True,
                    check=True,
                )
                assert f"PYTHONPATH={after}" in done.stdout.splitlines(), job.name


def _options_of(words: list[str]) -> set[str]:
    """What the --help of the programs of a command says."""
    found: set[str] = set()
    for place, word in enumerate(words):
        if word == "-m":
            command = ("-m", words[place + 1])
        elif word == "kernelbench":
            subcommands = [one for one in words[place + 1 : place + 3] if one.isalpha()]
            command = ("-m", "gristmill.bench.cli", *subcommands)
        else:
            continue
        found |= _help(*command)
    return found


@functools.cache
def _help(*command: str) -> set[str]:
    text = subprocess.run(
        [sys.executable, *command, "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    return set(re.findall(r"--[a-z][a-z-]*", text))
