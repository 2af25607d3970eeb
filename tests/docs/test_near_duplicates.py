"""The search for duplicated code: what it finds, and what it ignores. What it finds here, `make lint` says (ci/lint.sh)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "ci"))

import near_duplicates  # noqa: E402

BODY = "\n".join(f"    total += {n} * (value - {n}) + 1" for n in range(near_duplicates.LINES))
PARAMETERS = "\n".join(f"    argument_{n}: int," for n in range(2 * near_duplicates.MANY))
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


NATIVE = """// A kernel.
#include <cstdint>
__device__ void {name}({parameters}) {{
{body}
}}
"""
STATEMENTS = "\n".join(f"  total[{n}] = value * {n} + step;" for n in range(near_duplicates.LINES))


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(near_duplicates.repository, "ROOT", tmp_path)
    monkeypatch.setattr(near_duplicates, "ACCEPTED", {})
    (tmp_path / "kernels").mkdir()
    (tmp_path / "runtime").mkdir()
    return tmp_path / "kernels"


def test_a_planted_duplicate_is_found(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "one.py").write_text(FILE.format(name="one", body=BODY))
    (tree / "two.py").write_text(FILE.format(name="two", body=f"    # A comment.\n\n{BODY}"))
    assert near_duplicates.main() == 1
    place = FILE.count("\n", 0, FILE.index("{body}")) + 1
    assert capsys.readouterr().out.split(": ") == [
        f"kernels/one.py:{place} and kernels/two.py:{place + 2}",
        f"{near_duplicates.LINES + 1} equal lines\n",
    ]


@pytest.mark.parametrize("suffix", ["cuh", "cu", "cpp", "hip", "h"])
def test_a_planted_duplicate_in_native_code_is_found(
    tree: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other line breaks, comments and includes do not hide it; a string that looks like a comment is code."""
    (tree / f"one.{suffix}").write_text(NATIVE.format(name="one", parameters="int a", body=STATEMENTS))
    broken = STATEMENTS.replace(" = ", " =  // so\n   ").replace(";", "; /* and\n so */")
    (tree / f"two.{suffix}").write_text(NATIVE.format(name="two", parameters="long b", body=broken))
    assert near_duplicates.main() == 1
    assert f"kernels/one.{suffix}:3 and kernels/two.{suffix}:3" in capsys.readouterr().out
    text = STATEMENTS.replace("value", '"// a"', 1)
    assert near_duplicates.native_code(text) == text


def test_parameters_count_outside_of_kernels(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Launchers take what their operation declares; elsewhere a list of parameters that is repeated is a copy."""
    for name in ("one", "two"):
        (tree / f"{name}.py").write_text(FILE.format(name=name, body=f"    return {name}"))
    assert near_duplicates.main() == 0
    for name in ("one", "two"):
        (tree.parent / "runtime" / f"{name}.py").write_text(FILE.format(name=name, body=f"    return {name}"))
    assert near_duplicates.main() == 1
    assert "runtime/one.py:4 and runtime/two.py:4" in capsys.readouterr().out


def test_short_runs_and_declarations_are_left_out(tree: Path) -> None:
    short = BODY.rpartition("\n")[0].rpartition("\n")[0]
    declared = "\nKERNEL = Kernel(\n" + "\n".join(f"    field_{n}={n}," for n in range(40)) + "\n)\n"
    (tree / "one.py").write_text(FILE.format(name="one", body=f"{short}\n    total = 1") + declared)
    (tree / "two.py").write_text(FILE.format(name="two", body=f"{short}\n    total = 2") + declared)
    assert near_duplicates.main() == 0


def test_an_entry_that_is_no_longer_needed_is_named(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(near_duplicates, "ACCEPTED", {("kernels/one.py", "kernels/two.py"): "a reason"})
    assert near_duplicates.main() == 1
    assert "kernels/one.py and kernels/two.py no longer repeat each other" in capsys.readouterr().out
    (tree / "one.py").write_text(FILE.format(name="one", body=BODY))
    (tree / "two.py").write_text(FILE.format(name="two", body=BODY))
    assert near_duplicates.main() == 0


def test_every_entry_has_a_reason() -> None:
    assert all(near_duplicates.ACCEPTED.values())
