"""ci/check_wheel.py reports files that must not be in a distribution, and the Makefile's helpers report what
is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from gristmill.kernel_registry.build import normal_name
from gristmill.kernel_registry.registry import default_registry

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
import check_wheel  # noqa: E402
import requirements  # noqa: E402


def good_wheel_names() -> list[str]:
    names = [name for name in check_wheel.tracked() if check_wheel.carried(name)]
    assert {"src/gristmill/console.py", "src/gristmill/ops.pyi", "src/gristmill/py.typed"} <= {*names}
    names += ["_lib/manifest.json", "_lib/libgristmill_cpu.so"]
    return [f"gristmill/{name.removeprefix('src/gristmill/')}" for name in names]


def wheel(folder: Path, names: list[str], file: str = "gristmill-0.1.0-py3-none-linux_x86_64.whl") -> Path:
    with zipfile.ZipFile(folder / file, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return folder / file


def test_good_wheel_passes(tmp_path: Path) -> None:
    assert check_wheel.problems(wheel(tmp_path, good_wheel_names())) == []


@pytest.mark.parametrize(
    "extra,complaint",
    [
        ("gristmill/kernels/norm/_rms_norm_cpu.cpp", "native source"),
        ("gristmill/examples/models/a/model.safetensors", "model data"),
        ("gristmill/kernels/moe/grouped.cubin", "compiled code"),
        ("gristmill/_lib/0f3e.o", "compiled code"),
        ("tests/test_x.py", "outside gristmill/"),
        ("lab/cpu.py", "outside gristmill/"),
        ("gristmill/lab/cpu.py", "not part of the package"),
    ],
)
def test_extra_file_is_found(tmp_path: Path, extra: str, complaint: str) -> None:
    assert any(
        complaint in line for line in check_wheel.problems(wheel(tmp_path, [*good_wheel_names(), extra]))
    )


def test_missing_module_and_python_tag_are_found(tmp_path: Path) -> None:
    left_out = ("gristmill/kernels/native.py", "gristmill/ops.pyi")
    names = [name for name in good_wheel_names() if name not in left_out]
    report = check_wheel.problems(wheel(tmp_path, names, "gristmill-0.1.0-cp311-cp311-linux_x86_64.whl"))
    assert "lacks gristmill/ops.pyi" in report
    assert "lacks gristmill/kernels/native.py" in report
    assert any("tied to one Python" in line for line in report)


def test_sdist_without_native_sources_is_found(tmp_path: Path) -> None:
    path = tmp_path / "gristmill-0.1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(ROOT / "pyproject.toml", "gristmill-0.1.0/pyproject.toml")
    assert "lacks kernels/norm/_rms_norm_cpu.cpp" in check_wheel.problems(path)


def project() -> dict:
    loaded: dict = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return loaded


def test_requirements_follow_extras_of_extras() -> None:
    actual = requirements.requirements(project(), ["dev"])
    names = {line.split(">")[0].split("<")[0].split(";")[0] for line in actual}
    assert {
        "torch",
        "numpy",
        "triton",
        "safetensors",
        "click",
        "pytest",
        "ruff",
        "scikit-build-core",
    } <= names
    assert not any(line.startswith("gristmill") for line in actual)
    with pytest.raises(SystemExit, match="unknown extra 'gpu'"):
        requirements.requirements(project(), ["gpu"])


def test_every_requirement_of_ci_is_pinned() -> None:
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "ci" / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    }
    for line in requirements.requirements(project(), ["dev"]):
        name = normal_name(re.split(r"[\[<>=!~; ]", line, maxsplit=1)[0])
        assert name in pinned, f"{name} has no line in ci/constraints.txt"


NOT_OURS = {"deep-gemm", "deepgemm", "aiter"}
"""Never installed: projects on the index that are not the libraries which our wrappers call."""


def distributions(extra: str | None) -> set[str]:
    """Returns the normalized names of what gristmill installs, alone or with an extra."""
    lines = requirements.requirements(project(), [extra] if extra else [])
    names = (re.match(r"[A-Za-z0-9._-]+", line) for line in lines)
    return {normal_name(name.group()) for name in names if name}


def impostors(loaded: dict) -> dict[str, set[str]]:
    """Maps each extra to the names of NOT_OURS among its requirements, as written."""
    written = {"": loaded["dependencies"], **loaded["optional-dependencies"]}
    actual = {
        extra: {normal_name(re.split(r"[\[<>=!~; ]", line, maxsplit=1)[0]) for line in lines} & NOT_OURS
        for extra, lines in written.items()
    }
    return {extra: names for extra, names in actual.items() if names}


def test_no_extra_installs_another_project_of_a_librarys_name() -> None:
    assert impostors(project()) == {}
    for extra in project()["optional-dependencies"]:  # also through extras of extras
        assert not distributions(extra) & NOT_OURS
    pinned = {line.partition("==")[0] for line in (ROOT / "ci" / "constraints.txt").read_text().splitlines()}
    assert not {normal_name(name) for name in pinned} & NOT_OURS
    planted = {
        "dependencies": [],
        "optional-dependencies": {"a": ["Deep_GEMM>=1"], "b": ["numpy"], "c": ["aiter[x]"]},
    }
    assert impostors(planted) == {"a": {"deep-gemm"}, "c": {"aiter"}}


def test_an_extra_of_a_kernel_library_is_called_by_a_kernel() -> None:
    """Whatever `all` adds to the product's own extras provides kernels."""
    product = ("runtime", "metrics", "structured", "serve", "tracing", "bench")
    own_requirements = set().union(*(distributions(extra) for extra in product))
    libraries = project()["optional-dependencies"].keys() - {
        *product,
        "pytest",
        "test",
        "browser",
        "nixl",  # carries blocks of the KV cache; not in `all`
        "cutlass",  # compiles kernels of our own; under a licence of its own, and not in `all`
        "dev",
        "all",
    }
    providers = {kernel.provider for kernel in default_registry().all_kernels()}
    assert libraries == {"flashinfer", "humming"} and libraries <= providers
    assert distributions("all") == own_requirements.union(*(distributions(extra) for extra in libraries))


def test_kernels_alone_need_three_packages() -> None:
    names = sorted(line.split(">")[0] for line in requirements.requirements(project(), []))
    assert names == ["numpy", "torch", "triton"]


@pytest.mark.parametrize(
    "arguments,complaint",
    [
        (["no-such-python", "venv", "ci/constraints.txt", "stamp"], "no no-such-python"),
        ([sys.executable, "venv", "missing.txt", "stamp"], "CONSTRAINTS=missing.txt does not exist"),
    ],
)
def test_setup_says_what_is_missing(arguments: list[str], complaint: str) -> None:
    process = subprocess.run(["bash", "ci/setup.sh", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 1 and complaint in process.stderr


def test_make_lists_its_targets() -> None:
    process = subprocess.run(["make", "--no-print-directory", "-s"], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    for target in ("run", "test", "test-full", "build", "lint", "clean"):
        assert f"make {target} " in process.stdout
