"""The CUDA part of the build: the values of GRISTMILL_CUDA, and a tiny kernel from source to call. No GPU is
needed."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCALE = ROOT / "tests" / "packaging" / "_scale_sm90.cu"
SMALLEST = ("-DGRISTMILL_CPU_SOURCES=kernels/moe/permute/_permute_cpu.cpp", "-DGRISTMILL_CPU_LEVELS=base")
"""Of the CPU's library the smallest core at one level."""

needs_cmake = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("ninja") is None, reason="cmake and ninja"
)
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
pytestmark = needs_cmake


def configure(build: Path, *options: str, nvcc: bool = True) -> subprocess.CompletedProcess[str]:
    """Configures as a wheel build does, so that nothing is written beside the sources."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in {"GRISTMILL_CUDA", "GRISTMILL_RARE", "CUDA_HOME", "NVCC", "CUDACXX"}
    }
    # Neither on PATH nor where CMake looks by default; the tools that are needed are given by full path.
    if not nvcc:
        folders = [
            folder for folder in environment["PATH"].split(os.pathsep) if not (Path(folder) / "nvcc").exists()
        ]
        environment["PATH"] = os.pathsep.join(folders)
        options += (
            f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}",
            f"-DCMAKE_CXX_COMPILER={shutil.which('c++')}",
        )
        options += ("-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF",)
    command = [
        str(shutil.which("cmake")),
        "-S",
        str(ROOT),
        "-B",
        str(build),
        "-G",
        "Ninja",
        "-DSKBUILD_STATE=wheel",
        *options,
    ]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def status_line(process: subprocess.CompletedProcess[str]) -> str:
    assert process.returncode == 0, process.stderr
    lines = [line for line in process.stdout.splitlines() if "gristmill CUDA:" in line]
    assert len(lines) == 1
    return lines[0]


def test_off(tmp_path: Path) -> None:
    process = configure(tmp_path, "-DGRISTMILL_CUDA=off", *SMALLEST)
    assert "off, by GRISTMILL_CUDA" in status_line(process)
    assert not (tmp_path / "_lib" / "manifest.json").exists(), "nothing is built yet"
    subprocess.run(["cmake", "--build", tmp_path], check=True, capture_output=True)
    manifest = json.loads((tmp_path / "_lib" / "manifest.json").read_text())
    assert manifest["cuda"] == {} and "base" in manifest["cpu_levels"]
    assert not any(name.endswith(".cu") for name in manifest["sources"])


@needs_nvcc
def test_a_library_for_each_architecture_of_ptx(tmp_path: Path) -> None:
    """With cubins for those architectures that are not older than its PTX."""
    archs = ("80", "89", "120f")
    for arch in archs:
        shutil.copy(SCALE, tmp_path / f"_scale_sm{arch}.cu")
    options = [f"-DGRISTMILL_SM{arch}_SOURCES={tmp_path}/_scale_sm{arch}.cu" for arch in archs]
    options += [f"-DGRISTMILL_SM90_SOURCES={SCALE}", "-DGRISTMILL_CUBINS=86;120;120f", *SMALLEST]
    build = tmp_path / "build"
    process = configure(build, "-DGRISTMILL_CUDA=on", *options)
    assert "PTX: compute_80, 1 source(s), cubins: 86;120;120f" in process.stdout
    assert "PTX: compute_89, 1 source(s), cubins: 120;120f" in process.stdout
    assert "PTX: compute_120f, 1 source(s), cubins: 120f\n" in process.stdout
    subprocess.run(["cmake", "--build", build], check=True, capture_output=True)
    manifest = json.loads((build / "_lib" / "manifest.json").read_text())
    assert manifest["cuda"].keys() == {"sm_90a", "compute_80", "compute_89", "compute_120f"}
    built = {name: source["builds"].keys() for name, source in manifest["sources"].items()}
    assert built[str(tmp_path / "_scale_sm89.cu")] == {"compute_89"}
    library = ctypes.CDLL(str(build / "_lib" / manifest["cuda"]["compute_89"]["file"]))
    assert library.gm_test_scale(None, None, -1, 0, None) == -2
    for arch in archs:
        text = (build / f"cuda_compute{arch}" / f"_scale_sm{arch}.ptx").read_text()
        assert f".target sm_{arch}\n" in text


def test_unknown_mode_is_refused(tmp_path: Path) -> None:
    process = configure(tmp_path, "-DGRISTMILL_CUDA=perhaps")
    assert process.returncode != 0 and "expected auto, on or off" in process.stderr


@needs_nvcc
def test_what_is_rare_can_be_left_out(tmp_path: Path) -> None:
    process = configure(tmp_path, "-DGRISTMILL_RARE=off")
    assert "without 12 rare source(s) (GRISTMILL_RARE=off)" in status_line(process)
    manifest = json.loads((tmp_path / "manifest_base.json").read_text())
    older = [name for name in manifest["left_out"] if not name.endswith("_sm90")]
    assert (
        len(manifest["left_out"]) == 12 + len(older)
        and "linear_int4_g64_gemm_ws_sm90" in manifest["left_out"]
    )
    assert [name for name in older if not name.endswith("_sm80")] == [
        "compute_75",
        "compute_89",
        "compute_120f",
    ]
    rare = {path.stem for path in (ROOT / "kernels").rglob("*_rare_sm80.cu")}
    assert {*older} == {"compute_75", "compute_89", "compute_120f", *rare} and len(rare) > 20
    compiled = (tmp_path / "compiled.cmake").read_text()
    assert "linear_int4_g64_gemm_ws_sm90" not in compiled and "gemm_sm75" not in compiled
    assert "rare" not in status_line(configure(tmp_path, "-DGRISTMILL_RARE=on"))
    assert json.loads((tmp_path / "manifest_base.json").read_text())["left_out"] == []
    assert "linear_int4_g64_gemm_sm75" in (tmp_path / "compiled.cmake").read_text()
    process = configure(tmp_path, "-DGRISTMILL_RARE=perhaps")
    assert process.returncode != 0 and "GRISTMILL_RARE=perhaps: expected on or off" in process.stderr


def test_without_nvcc(tmp_path: Path) -> None:
    assert "no nvcc found" in status_line(configure(tmp_path / "auto", nvcc=False))
    process = configure(tmp_path / "on", "-DGRISTMILL_CUDA=on", nvcc=False)
    assert process.returncode != 0 and "no nvcc was found" in process.stderr


@needs_nvcc
def test_kernel_is_compiled_embedded_and_loadable(tmp_path: Path) -> None:
    options = (f"-DGRISTMILL_SM90_SOURCES={SCALE}", *SMALLEST)
    process = configure(tmp_path, "-DGRISTMILL_CUDA=on", *options)
    assert "sm_90a by nvcc" in status_line(process)
    subprocess.run(["cmake", "--build", tmp_path], check=True, capture_output=True)
    entry = json.loads((tmp_path / "_lib" / "manifest.json").read_text())["cuda"]["sm_90a"]
    path = tmp_path / "_lib" / entry["file"]
    needed = subprocess.run(["readelf", "-dW", path], check=True, capture_output=True, text=True).stdout
    assert "libcuda" not in needed and "stdc++" not in needed
    data = path.read_bytes()
    cubin = tmp_path / "cuda_sm90a" / "_scale_sm90.cubin"
    image = cubin.with_suffix(".fatbin") if float(entry["nvcc"]) >= 13 else cubin
    assert image.read_bytes() in data and image.stat().st_size <= cubin.stat().st_size
    library = ctypes.CDLL(str(path))  # needs neither a driver nor a device
    probe = library.gm_cuda_probe()
    assert probe in (0, -6)
    if probe == -6:
        assert library.gm_test_scale(None, None, 1, 0, None) == -6
    assert library.gm_test_scale(None, None, -1, 0, None) == -2
