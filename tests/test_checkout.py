"""The tests of a checkout run with its own package or not at all: tests/conftest.py refuses any other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, complaint

EDITABLE = """
import sys
from importlib.util import spec_from_file_location

class Redirecting:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "gristmill":
            return spec_from_file_location(name, {file!r}, submodule_search_locations=[{folder!r}])

sys.meta_path.insert(0, Redirecting)
"""
"""What an editable installation of another checkout adds to every interpreter of an environment: a finder before those of sys.path."""
NOT_EDITABLE = """
import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
"""
"""Takes the finder away that this environment has where this checkout is installed in it."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with this conftest.py, a package of the few names that it imports, and one test."""
    files = {
        "pytest.ini": "[pytest]\npythonpath = src\n",
        "src/gristmill/__init__.py": "",
        "src/gristmill/kernel_registry/targets/probe.py": "class probe_devices:\n    targets = ()\n",
        "tests/__init__.py": "",
        "tests/test_one.py": "def test_one() -> None:\n    pass\n",
    }
    for name, text in files.items():
        path = tmp_path / "second" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "second" / "tests")
    return tmp_path / "second"


def run_tests(checkout: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Runs the checkout's tests, with a folder in front of its package on PYTHONPATH."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(site), str(checkout / "src"))),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)


def test_an_editable_installation_of_another_checkout_is_refused(checkout: Path, tmp_path: Path) -> None:
    package = ROOT / "src" / "gristmill"
    editable, plain = tmp_path / "editable", tmp_path / "plain"
    for site, text in (
        (editable, EDITABLE.format(file=str(package / "__init__.py"), folder=str(package))),
        (plain, NOT_EDITABLE),
    ):
        site.mkdir()
        (site / "sitecustomize.py").write_text(text, encoding="utf-8")
    refused = run_tests(checkout, editable)
    assert refused.returncode == pytest.ExitCode.USAGE_ERROR and "1 passed" not in refused.stdout
    for line in (
        f"the tests of {checkout}",
        f"expected: {checkout / 'src' / 'gristmill' / '__init__.py'}",
        f"imported: {package / '__init__.py'}",
        "pip uninstall gristmill",
    ):
        assert line in refused.stderr
    accepted = run_tests(checkout, plain)
    assert accepted.returncode == 0 and "1 passed" in accepted.stdout, accepted.stdout + accepted.stderr


def test_only_the_file_of_the_checkout_is_accepted(tmp_path: Path) -> None:
    package = ROOT / "src" / "gristmill" / "__init__.py"
    (tmp_path / "link").symlink_to(ROOT)
    assert complaint(str(package), ROOT) is None
    assert complaint(str(package), tmp_path / "link") is None  # the same checkout by another path
    assert "__init__.py" in (complaint(str(package), tmp_path) or "")
    assert "imported: None" in (complaint(None, ROOT) or "")  # a folder without the file: a namespace
