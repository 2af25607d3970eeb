"""The library of HIP kernels as it is built: it loads without ROCm, and says what is missing. And the values of GRISTMILL_HIP."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gristmill.kernel_registry.build import Build
from gristmill.kernels.hip import LIBRARY, check, hip_entry, hip_function
from gristmill.kernels.linear.wv_splitk_hip.args import ARGS
from gristmill.kernels.linear.wv_splitk_hip.spec import CODE
from gristmill.quant.native import NativeLibraryError, library_dir

ROOT = Path(__file__).resolve().parents[2]
built = pytest.mark.skipif(
    not (library_dir() / LIBRARY).is_file(),
    reason="built without clang for AMD GPUs (apt-get install clang-22 lld-22)",
)


def _call(**fields: object) -> int:
    args = ARGS.new(arch=b"gfx1100", m=1, n=16, k=64, chunk=64, lanes=32, x_type=2)
    args.per_split = args.splits = args.tiles = args.blocks = 1
    for name, value in fields.items():
        setattr(args, name, value)
    return hip_entry("gm_linear_wv_splitk", ARGS)(args)


@built
def test_the_build_has_every_target_that_the_kernels_claim() -> None:
    assert set(Build.probe().hip_archs) == set(CODE)


@built
@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({}, RuntimeError, "no HIP runtime: libamdhip64.so"),
        ({"arch": b"gfx1030"}, RuntimeError, "no code object for this device"),
        ({"k": 60}, ValueError, "out of its range"),
        ({"m": 9}, ValueError, "out of its range"),
        ({"m": 8, "k": 8192, "chunk": 8192}, ValueError, "out of its range"),
        ({"x_type": 0}, TypeError, "dtype"),
        ({"lanes": 16}, ValueError, "out of its range"),
    ],
    ids=str,
)
def test_without_a_runtime_or_with_wrong_arguments_it_says_so(
    fields: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check(_call(**fields), "linear by wvSplitK")


def test_no_rows_need_no_runtime_and_names_are_checked() -> None:
    if (library_dir() / LIBRARY).is_file():
        assert _call(m=0) == 0
        with pytest.raises(NativeLibraryError, match="no function gm_nothing"):
            hip_function("gm_nothing", ())
    else:
        with pytest.raises(NativeLibraryError, match="GRISTMILL_HIP=on"):
            hip_entry("gm_linear_wv_splitk", ARGS)


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-DGRISTMILL_HIP=perhaps"], "expected auto, on or off"),
        (["-DGRISTMILL_HIP=on", "-DGRISTMILL_HIP_CLANG=/bin/false"], "install clang 20 or newer"),
    ],
    ids=["unknown value", "on without clang"],
)
def test_a_build_that_cannot_have_it_stops(options: list[str], message: str, tmp_path: Path) -> None:
    command = [
        "cmake",
        "-S",
        str(ROOT),
        "-B",
        str(tmp_path),
        "-G",
        "Ninja",
        "-DSKBUILD_STATE=wheel",
        "-DGRISTMILL_CUDA=off",
    ]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode != 0 and message in " ".join(done.stderr.split())
