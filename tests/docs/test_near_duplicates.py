"""The search for duplicated code: what it finds, and what it ignores."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "ci"))

import near_duplicates  # noqa: E402

BODY = "\n".join(f"    total += {n} * value" for n in range(near_duplicates.LINES))
PARAMETERS = "\n".join(f"    argument_{n}: int," for n in range(near_duplicates.LINES))
FILE = f'''"""A docstring
that is long."""

def {{name}}(
{PARAMETERS}
) -> int:
    """Every such function has these parameters."""
    total = {{name}}
{{body}}
    return total
'''


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(near_duplicates, "ROOT", tmp_path)
    monkeypatch.setattr(near_duplicates, "KNOWN", {})
    (tmp_path / "kernels").mkdir()
    return tmp_path / "kernels"


def test_what_is_known_is_all_there_is() -> None:
    assert near_duplicates.main() == 0


def test_a_planted_duplicate_is_found(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "one.py").write_text(FILE.format(name="one", body=BODY))
    (tree / "two.py").write_text(FILE.format(name="two", body=f"    # A comment.\n\n{BODY}"))
    assert near_duplicates.main() == 1
    place = FILE.count("\n", 0, FILE.index("{body}")) + 1
    assert capsys.readouterr().out.split(": ") == [
        f"kernels/one.py:{place} and kernels/two.py:{place + 2}",
        f"{near_duplicates.LINES + 1} equal lines\n",
    ]


def test_parameters_and_short_runs_are_left_out(tree: Path) -> None:
    short = BODY.rpartition("\n")[0]
    (tree / "one.py").write_text(FILE.format(name="one", body=f"{short}\n    total = 1"))
    (tree / "two.py").write_text(FILE.format(name="two", body=f"{short}\n    total = 2"))
    assert near_duplicates.main() == 0


def test_an_entry_that_is_no_longer_needed_is_named(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(near_duplicates, "KNOWN", {("kernels/one.py", "kernels/two.py"): "a reason"})
    assert near_duplicates.main() == 1
    assert "kernels/one.py and kernels/two.py no longer repeat each other" in capsys.readouterr().out
