"""Targets: facts of the table, parsing, JSON, code compatibility, probing."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gristmill.kernel_registry.target import Target, known_devices, known_targets, runs_code_of
from gristmill.kernel_registry.targets.probe import probe_amd, probe_cpu, probe_cuda, probe_intel

HAS = {
    "sm_75": "mma.int4 ldmatrix",
    "sm_80": "mma.bf16 cp_async",
    "sm_89": "mma.fp8 fp8.ocp mma.int4",
    "sm_90": "wgmma tma setmaxnreg clusters pdl mma.fp8",
    "sm_100": "tcgen05 mma.nvf4 tma mma.mxf8",
    "sm_103": "tcgen05 mma.mxf4",
    "sm_110": "tcgen05 tma",
    "sm_120": "mma.mxf4 mma.nvf4 tma mma.sync.block_scale",
    "sm_121": "mma.mxf4 mma.nvf4 mma.block_scale",
    "gfx906": "sdot4 wave64 dot2",
    "gfx90a": "mfma mfma.bf16",
    "gfx942": "fp8.fnuz mfma.fp8",
    "gfx950": "fp8.ocp mfma.mxf4 mfma.scale",
    "gfx1030": "wave32 sdot4",
    "gfx1100": "wmma wave32",
    "gfx1151": "wmma",
    "gfx1201": "wmma.fp8 fp8.ocp",
    "gfx1250": "wmma.mxf4",
    "xpu:bmg": "dpas block2d",
    "xpu:pvc": "dpas.tf32",
    "cpu:amx": "amx_int8 avx512_bf16 avx2",
    "cpu:neon_i8mm": "neon_dotprod neon",
    "cpu:vxe": "vx",
}
LACKS = {
    "sm_70": "ldmatrix mma.int8 mma.bf16",
    "sm_75": "mma.bf16 cp_async",
    "sm_86": "mma.fp8 fp8.ocp tma",
    "sm_89": "tma wgmma",
    "sm_90": "tcgen05 mma.nvf4 mma.int4 mma.block_scale",
    "sm_100": "wgmma mma.sync.block_scale",
    "sm_103": "wgmma tcgen05.int8",
    "sm_110": "wgmma",
    "sm_120": "tcgen05 wgmma tma.multicast",
    "sm_121": "tcgen05 wgmma",
    "gfx906": "mfma",
    "gfx90a": "mfma.fp8 fp8.fnuz fp8.ocp",
    "gfx942": "fp8.ocp mfma.scale",
    "gfx950": "fp8.fnuz mfma.xf32",
    "gfx1030": "wmma",
    "gfx1100": "wmma.fp8 fp8.ocp",
    "gfx1201": "mfma fp8.fnuz",
    "cpu:avx512": "avx512_vnni",
    "cpu:avx2": "avx512",
    "cpu:neon": "neon_dotprod",
}


@pytest.mark.parametrize("name", HAS)
def test_has(name: str) -> None:
    assert set(HAS[name].split()) <= Target.parse(name).features


@pytest.mark.parametrize("name", LACKS)
def test_lacks(name: str) -> None:
    assert not set(LACKS[name].split()) & Target.parse(name).features


def test_every_name_and_device_round_trips() -> None:
    assert len(known_targets()) >= 40
    for name in (*known_targets(), *known_devices()):
        target = Target.parse(name)
        assert target.describe().startswith(target.name)
        assert Target.from_json(json.loads(json.dumps(target.to_json()))) == target
        assert Target.parse(target.name).features == target.features


def test_h200_ceilings() -> None:
    h200 = Target.parse("H200")
    assert (h200.name, h200.multiprocessors, h200.l2_bytes, h200.bandwidth_gbs) == (
        "sm_90",
        132,
        60 << 20,
        4250.0,
    )
    assert (
        h200.smem_bytes == 227 * 1024
        and h200.triton_target == ("cuda", 90, 32)
        and h200.nvcc_arch == "sm_90a"
    )
    assert Target.parse("mi300x").triton_target == ("hip", "gfx942", 64)
    assert Target.parse("gfx1100").triton_target == ("hip", "gfx1100", 32)
    assert Target.parse("gb10").name == "sm_121" and Target.parse("cpu:avx2").triton_target is None


def test_edits_are_canonical() -> None:
    target = Target.parse("sm90-tma+foo")
    assert target.name == "sm_90+foo-tma" and target == Target.parse(target.name)
    assert "foo" in target.features and "tma" not in target.features and target.base == "sm_90"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sm_122", "near: .*sm_12"),
        ("gfx94", "gfx942"),
        ("h20", "h200"),
        ("", "known"),
        ("cpu:avx1024", "near"),
        ("sm_90-tmaa", "no feature 'tmaa'"),
        ("sm_90+tma", "already"),
        ("sm_90++x", "edits"),
    ],
)
def test_parse_errors(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Target.parse(text)


@pytest.mark.parametrize(
    ("target", "code", "runs"),
    [
        ("sm_86", "sm_80", True),
        ("sm_89", "sm_80", True),
        ("sm_80", "sm_86", False),
        ("sm_90", "sm_80", False),
        ("sm_87", "sm_80", False),
        ("sm_87", "sm_87", True),
        ("sm_87", "compute_80", True),
        ("sm_89", "sm_87", False),
        ("sm_90", "sm_90a", True),
        ("sm_100", "sm_90a", False),
        ("sm_103", "sm_100a", False),
        ("sm_103", "sm_100", True),
        ("sm_103", "sm_100f", True),
        ("sm_100", "sm_103f", False),
        ("sm_110", "sm_100f", False),
        ("sm_110", "sm_100a", False),
        ("sm_120", "sm_100a", False),
        ("sm_121", "sm_120a", False),
        ("sm_121", "sm_120f", True),
        ("sm_121", "sm_120", True),
        ("sm_120", "sm_121", False),
        ("sm_120", "compute_90", True),
        ("sm_120", "compute_90a", False),
        ("sm_80", "compute_90", False),
        ("gfx942", "gfx942", True),
        ("gfx950", "gfx942", False),
        ("gfx950", "gfx9-4-generic", True),
        ("gfx1151", "gfx11-generic", True),
        ("gfx1201", "gfx11-generic", False),
        ("gfx942", "sm_90a", False),
        ("cpu:avx512", "cpu:avx2", True),
        ("cpu:avx512", "cpu:avx512_vnni", False),
        ("cpu:avx2", "cpu:neon", False),
        ("cpu:amx", "avx512_bf16", True),
        ("cpu:vxe", "cpu:base", True),
        ("cpu:base", "cpu:avx2", False),
    ],
)
def test_runs_code_of(target: str, code: str, runs: bool) -> None:
    assert runs_code_of(Target.parse(target), code) is runs


def test_no_code_name() -> None:
    with pytest.raises(ValueError, match="no code name"):
        runs_code_of(Target.parse("sm_90"), "hopper")


def test_import_is_light(tmp_path: Path) -> None:
    """In a separate process, importing needs neither torch nor numpy.

    It takes 50 ms of processor time or, on a busy machine, as little as a module of the standard library that
    takes about as long. The first process writes the bytecode that the others use.
    """
    code = (
        "import time, sys; t = time.process_time(); import asyncio; known = time.process_time() - t;"
        "t = time.process_time(); import gristmill.kernel_registry.registry, gristmill.kernel_registry.select;"
        "print(time.process_time() - t, known, sorted({'torch', 'numpy', 'triton'} & set(sys.modules)))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    env = {**env, "PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    out = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
        ).stdout.split()
        for _ in range(5)
    ]
    assert all(line[2] == "[]" for line in out)
    import_time, known = (min(float(line[place]) for line in out) for place in (0, 1))
    assert import_time < 0.05 or import_time < 1.5 * known, (import_time, known)


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


AVX512 = "avx2 fma f16c avx512f avx512bw avx512vl avx512dq"


@pytest.mark.parametrize(
    ("machine", "flags", "best"),
    [
        ("x86_64", AVX512, "cpu:avx512"),
        ("x86_64", f"{AVX512} avx512_bf16", "cpu:avx512"),
        ("x86_64", "avx2 fma f16c", "cpu:avx2"),
        ("x86_64", "avx2 fma", "cpu:base"),
        ("x86_64", f"{AVX512} avx512_vnni", "cpu:avx512_vnni"),
        ("x86_64", f"{AVX512} avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16", "cpu:amx"),
        ("aarch64", "fp asimd asimddp", "cpu:neon_dotprod"),
        ("aarch64", "fp asimd sve", "cpu:neon"),
        ("aarch64", "asimd asimddp i8mm sve bf16", "cpu:sve"),
        ("s390x", "esan3 vx vxe", "cpu:vxe"),
        ("riscv64", "", "cpu:base"),
    ],
)
def test_probe_cpu(tmp_path: Path, machine: str, flags: str, best: str) -> None:
    key = "Features" if machine == "aarch64" else "flags"
    write(
        tmp_path,
        "proc/cpuinfo",
        "".join(f"processor\t: {i}\nmodel name\t: Fake\n{key}\t\t: {flags}\n\n" for i in range(3)),
    )
    write(tmp_path, "proc/meminfo", "MemTotal:       1024 kB\n")
    for index, (level, size, kind) in enumerate(
        [("1", "32K", "Instruction"), ("2", "1024K", "Unified"), ("3", "8M", "Unified")]
    ):
        for name, text in (("level", level), ("size", size), ("type", kind)):
            write(tmp_path, f"sys/devices/system/cpu/cpu0/cache/index{index}/{name}", text + "\n")
    target = probe_cpu(tmp_path, machine)
    assert (target.name, target.multiprocessors, target.l2_bytes, target.memory_bytes) == (
        best,
        3,
        8 << 20,
        1 << 20,
    )
    assert target.levels[0] == best and target.levels[-1] == "cpu:base" and target.device == "Fake"


def test_probe_cpu_without_proc(tmp_path: Path) -> None:
    assert probe_cpu(tmp_path, "x86_64").name == "cpu:base"
    assert probe_cpu(tmp_path, "arm64").name == "cpu:neon"


def test_probe_amd(tmp_path: Path) -> None:
    assert probe_amd(tmp_path).targets == () and "kfd" in probe_amd(tmp_path).reasons[0]
    for node, version in enumerate(("0", "90402", "90010", "110501", "130000")):
        text = f"simd_count 1216\nsimd_per_cu 4\ngfx_target_version {version}\n"
        write(tmp_path, f"sys/class/kfd/kfd/topology/nodes/{node}/properties", text)
    actual = probe_amd(tmp_path)
    assert [t.name for t in actual.targets] == ["gfx942", "gfx90a", "gfx1151"] and actual.targets[
        0
    ].multiprocessors == 304
    assert "gfx1300" in actual.reasons[0]


def test_probe_intel(tmp_path: Path) -> None:
    assert probe_intel(tmp_path).reasons == ("no Intel GPU here",)
    write(tmp_path, "sys/class/drm/card0/device/vendor", "0x8086\n")
    write(tmp_path, "sys/class/drm/card0/device/device", "0xe20b\n")
    assert [t.name for t in probe_intel(tmp_path).targets] == ["xpu:bmg"]


class FakeCuda:
    """libcuda as seen by ctypes: `devices` are (name, major, minor)."""

    def __init__(self, devices: list[tuple[str, int, int]], status: int = 0) -> None:
        self.devices, self.status = devices, status

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = len(self.devices)
        return 0

    def cuDeviceGet(self, out: Any, index: int) -> int:
        out._obj.value = index
        return 0

    def cuDeviceGetName(self, out: Any, size: int, handle: ctypes.c_int) -> int:
        out.value = self.devices[handle.value][0].encode()
        return 0

    def cuDeviceGetAttribute(self, out: Any, number: int, handle: ctypes.c_int) -> int:
        _, major, minor = self.devices[handle.value]
        known = {75: major, 76: minor, 16: 131}
        out._obj.value = known.get(number, 0)
        return 0 if number in known else 1

    def cuDeviceTotalMem_v2(self, out: Any, handle: ctypes.c_int) -> int:
        out._obj.value = 7
        return 0


def test_probe_cuda_mixed() -> None:
    actual = probe_cuda(
        FakeCuda([("NVIDIA H200", 9, 0), ("NVIDIA GH200 480GB", 9, 0), ("Odd", 12, 1), ("Future", 13, 0)])
    )
    assert [t.name for t in actual.targets] == ["sm_90", "sm_90", "sm_121"]
    assert actual.targets[0].bandwidth_gbs == 4250 and actual.targets[0].multiprocessors == 131
    assert actual.targets[1].bandwidth_gbs is None and actual.targets[2].device == "Odd"
    assert "sm_130" in actual.reasons[0]
    assert "error 100" in probe_cuda(FakeCuda([], status=100)).reasons[0]
    assert probe_cuda(FakeCuda([])).reasons
