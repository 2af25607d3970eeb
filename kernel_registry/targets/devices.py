"""Well-known devices: their architecture and ceilings, so that a plan can be requested by device name.

Numbers are data-sheet values (dense matrix throughput in TFLOP/s, bandwidth in GB/s = 1e9 bytes per second) unless marked
measured. Probing a real device adds its own counts; unknown ceilings stay unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1 << 20
_GB = 10**9


@dataclass(frozen=True)
class Device:
    """One product; the driver's name of the device contains all lower-case words of `pattern`."""

    alias: str
    title: str
    target: str
    pattern: tuple[str, ...]
    multiprocessors: int | None = None
    l2_bytes: int | None = None
    memory_bytes: int | None = None
    bandwidth_gbs: float | None = None
    bandwidth_source: str = "datasheet"
    tflops: tuple[tuple[str, float], ...] = ()


def _d(
    alias: str,
    title: str,
    target: str,
    pattern: str,
    units: int | None,
    l2_mib: float | None,
    memory_gb: float | None,
    gbs: float | None,
    source: str = "datasheet",
    **tflops: float,
) -> Device:
    return Device(
        alias,
        title,
        target,
        tuple(pattern.split()),
        units,
        None if l2_mib is None else int(l2_mib * _MIB),
        None if memory_gb is None else int(memory_gb * _GB),
        gbs,
        source,
        tuple(sorted(tflops.items())),
    )


DEVICES: tuple[Device, ...] = (
    _d("v100", "NVIDIA V100 32GB", "sm_70", "v100", 80, 6, 32, 900, fp16=125, fp32=15.7),
    _d("t4", "NVIDIA T4", "sm_75", "tesla t4", 40, 4, 16, 320, fp16=65, int8=130, fp32=8.1),
    _d(
        "a100",
        "NVIDIA A100 80GB",
        "sm_80",
        "a100 80gb",
        108,
        40,
        80,
        2039,
        fp16=312,
        bf16=312,
        tf32=156,
        int8=624,
        fp32=19.5,
    ),
    _d(
        "rtx3090",
        "NVIDIA GeForce RTX 3090",
        "sm_86",
        "rtx 3090",
        82,
        6,
        24,
        936,
        fp16=71,
        bf16=71,
        int8=284,
        fp32=35.6,
    ),
    _d(
        "rtx4090",
        "NVIDIA GeForce RTX 4090",
        "sm_89",
        "rtx 4090",
        128,
        72,
        24,
        1008,
        fp16=165.2,
        bf16=165.2,
        fp8=330.3,
        fp32=82.6,
    ),
    _d("l4", "NVIDIA L4", "sm_89", "nvidia l4", 58, 48, 24, 300, fp16=121, bf16=121, fp8=242, fp32=30.3),
    _d("l40s", "NVIDIA L40S", "sm_89", "l40s", 142, 96, 48, 864, fp16=362, bf16=362, fp8=733, fp32=91.6),
    _d(
        "h100",
        "NVIDIA H100 SXM",
        "sm_90",
        "h100 80gb hbm3",
        132,
        50,
        80,
        3350,
        fp16=989,
        bf16=989,
        fp8=1979,
        int8=1979,
        tf32=494,
        fp32=67,
    ),
    _d(
        "h200",
        "NVIDIA H200",
        "sm_90",
        "h200",
        132,
        60,
        141,
        4250,
        "measured copy",
        fp16=989,
        bf16=989,
        fp8=1979,
        int8=1979,
        tf32=494,
        fp32=67,
    ),
    _d(
        "gh200",
        "NVIDIA GH200",
        "sm_90",
        "gh200",
        132,
        None,
        None,
        None,
        fp16=989,
        bf16=989,
        fp8=1979,
        int8=1979,
        tf32=494,
        fp32=67,
    ),
    _d(
        "b200",
        "NVIDIA B200",
        "sm_100",
        "b200",
        148,
        126,
        180,
        8000,
        fp16=2250,
        bf16=2250,
        fp8=4500,
        nvfp4=9000,
    ),
    _d("b300", "NVIDIA B300", "sm_103", "b300", None, None, 288, 8000, fp16=2250, bf16=2250, fp8=4500),
    _d("thor", "NVIDIA Jetson Thor", "sm_110", "thor", 20, None, 128, 273),
    _d("orin", "NVIDIA Jetson AGX Orin", "sm_87", "orin", 16, None, 64, 204.8),
    _d(
        "rtx5090",
        "NVIDIA GeForce RTX 5090",
        "sm_120",
        "rtx 5090",
        170,
        96,
        32,
        1792,
        fp16=209.5,
        bf16=209.5,
        fp8=419,
        nvfp4=1676,
        fp32=104.8,
    ),
    _d("rtxpro6000", "NVIDIA RTX PRO 6000 Blackwell", "sm_120", "rtx pro 6000", 188, 128, 96, 1792),
    _d("gb10", "NVIDIA GB10", "sm_121", "gb10", 48, 24, 128, 273),
    _d("mi50", "AMD Instinct MI50", "gfx906", "mi50", 60, 4, 16, 1024, fp16=26.5, fp32=13.3),
    _d(
        "mi250x",
        "AMD Instinct MI250X (one GCD)",
        "gfx90a",
        "mi250x",
        110,
        8,
        64,
        1638,
        fp16=191.5,
        bf16=191.5,
        int8=191.5,
    ),
    _d(
        "mi300x",
        "AMD Instinct MI300X",
        "gfx942",
        "mi300x",
        304,
        32,
        192,
        5300,
        fp16=1307,
        bf16=1307,
        fp8=2615,
        int8=2615,
        fp32=163.4,
    ),
    _d(
        "mi325x",
        "AMD Instinct MI325X",
        "gfx942",
        "mi325x",
        304,
        32,
        256,
        6000,
        fp16=1307,
        bf16=1307,
        fp8=2615,
        int8=2615,
        fp32=163.4,
    ),
    _d(
        "mi355x",
        "AMD Instinct MI355X",
        "gfx950",
        "mi355x",
        256,
        32,
        288,
        8000,
        fp16=2516,
        bf16=2516,
        fp8=5033,
        mxfp4=10066,
        fp32=157.3,
    ),
    _d("rx6900xt", "AMD Radeon RX 6900 XT", "gfx1030", "rx 6900 xt", 80, 4, 16, 512),
    _d(
        "rx7900xtx",
        "AMD Radeon RX 7900 XTX",
        "gfx1100",
        "rx 7900 xtx",
        96,
        6,
        24,
        960,
        fp16=122.8,
        bf16=122.8,
        fp32=61.4,
    ),
    _d("strixhalo", "AMD Radeon 8060S (Strix Halo)", "gfx1151", "8060s", 40, 2, None, 256),
    _d(
        "rx9070xt",
        "AMD Radeon RX 9070 XT",
        "gfx1201",
        "rx 9070 xt",
        64,
        8,
        16,
        640,
        fp16=195,
        bf16=195,
        fp8=389,
    ),
    _d("max1550", "Intel Data Center GPU Max 1550", "xpu:pvc", "max 1550", 128, 408, 128, 3277),
    _d("b580", "Intel Arc B580", "xpu:bmg", "b580", 20, 18, 12, 456),
)

ALIASES: dict[str, Device] = {d.alias: d for d in DEVICES}


def by_device_name(name: str) -> Device | None:
    """The well-known device that the driver calls `name` (the longest pattern wins), or None."""
    low = name.lower()
    fits = [d for d in DEVICES if all(word in low for word in d.pattern)]
    fits = [d for d in fits if d.alias != "h200" or "gh200" not in low]
    fits = [d for d in fits if d.alias != "b200" or "gb200" not in low]
    fits = [d for d in fits if d.alias != "l4" or "l40" not in low]
    return max(fits, key=lambda d: len(" ".join(d.pattern)), default=None)
