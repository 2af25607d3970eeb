"""The table of time budgets in CONTRIBUTING, and the failure of a suite that exceeds its row."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "ci"))

import budget  # noqa: E402

TABLE = """
| suite | CPU seconds | what takes them |
|---|---:|---|
| `tests/one` | 10 | waiting |
| native build | 600 | compilers |
"""


def test_every_suite_has_a_row_and_every_row_a_suite() -> None:
    allowed = budget.budgets(budget.PAGE.read_text(encoding="utf-8"))
    folders = {f"tests/{p.name}" for p in (ROOT / "tests").iterdir() if any(p.glob("test_*.py"))}
    assert set(allowed) == {*folders - {"tests/gpu"}, "tests", budget.BUILD}


def test_a_suite_over_its_budget_or_without_one_is_named() -> None:
    allowed = budget.budgets(TABLE)
    assert allowed == {"tests/one": 10, "native build": 600}
    assert budget.overruns({"tests/one": 9.9}, allowed) == []
    assert budget.overruns({"tests/one": 12.0}, allowed) == ["tests/one took 12 s; its budget is 10 s"]
    assert "has no row" in budget.overruns({"tests/two": 0.1}, allowed)[0]


def test_a_page_without_the_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="no table of budgets"):
        budget.budgets("| step | seconds |\n|---|---|\n| x | 1 |\n")


def test_build_seconds_count_each_command_once() -> None:
    # ninja writes one line per name of an output, and appends the lines of later builds.
    log = "# ninja log v6\n0\t9000\t0\ta.o\tc1\n0\t4000\t1\ta.o\tc1\n0\t4000\t1\t/x/a.o\tc1\n500\t1500\t2\tb.o\tc2\n"
    assert budget.build_seconds(log) == 5.0


def test_the_seconds_of_a_child_count_before_and_after_it_ends() -> None:
    begin = budget.cpu_seconds()
    code = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None and child.stdout.readline()
        alive = budget.cpu_seconds()
        child.communicate()
    assert alive - begin > 0.1 and budget.cpu_seconds() - alive < 0.1


def test_a_slower_processor_has_more_seconds_and_a_faster_one_not_fewer() -> None:
    assert budget.pace([2 * budget.REFERENCE, 9.0, 1e-6]) == 2.0
    assert budget.pace([budget.REFERENCE / 2]) == budget.pace([]) == 1.0
    assert 0 < budget.timed_work() < 1


@pytest.mark.parametrize(("slower", "status"), [(1.0, 1), (1.9, 1), (2.1, 0)])
def test_a_build_of_a_slow_or_busy_machine_has_more_seconds(
    slower: float,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / ".ninja_log").write_text("# ninja log v6\n0\t1200000\t0\ta.o\tc1\n")
    (tmp_path / "CONTRIBUTING.md").write_text(TABLE)
    monkeypatch.setattr(budget, "ROOT", tmp_path)
    monkeypatch.setattr(budget, "PAGE", tmp_path / "CONTRIBUTING.md")
    monkeypatch.setattr(budget, "time_while_busy", lambda: slower * budget.REFERENCE)
    assert budget.main() == status
    assert ("its budget is 600 s" in capsys.readouterr().out) == bool(status)


def test_time_that_others_take_counts_for_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "work", lambda: time.sleep(0.005))
    assert budget.time_while_busy() >= 0.005 > budget.timed_work()


@pytest.mark.parametrize(("seconds", "status"), [(0, 1), (1000, 0)])
def test_the_plugin_fails_a_run_that_is_over_budget(tmp_path: Path, seconds: int, status: int) -> None:
    """A tree with one suite of one test, run by two workers as in CI."""
    (tmp_path / "ci").mkdir()
    (tmp_path / "tests" / "one").mkdir(parents=True)
    (tmp_path / "ci" / "budget.py").write_text((ROOT / "ci" / "budget.py").read_text())
    (tmp_path / "CONTRIBUTING.md").write_text(TABLE.replace("| 10 |", f"| {seconds} |"))
    (tmp_path / "tests" / "one" / "test_it.py").write_text(
        "import time\n\ndef test_it():\n    begin = time.process_time()\n    while time.process_time() - begin < 0.2: pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "ci.budget", "-p", "no:benchmark"]
    process = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "tests"],
        cwd=tmp_path,
        env={"PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == status, process.stdout + process.stderr
    assert ("over budget: tests/one took" in process.stdout) == bool(status), process.stdout
    assert "1 passed" in process.stdout
