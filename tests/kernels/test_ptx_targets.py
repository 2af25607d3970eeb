"""The libraries' PTX, assembled for every target that kernels of it have a grade of proof for (ci/ptx_baseline.json)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from tests.kernels.machine_code import assembled, entries, needs_assembler
from tests.kernels.test_paged_attention_sm80 import STACK_ON_RECORD

ROOT = Path(__file__).resolve().parents[2]
BASELINE = json.loads((ROOT / "ci" / "ptx_baseline.json").read_text(encoding="utf-8"))
KERNELS = {kernel.name: kernel for kernel in default_registry().all_kernels()}
PRODUCTS = {
    "grouped_topk_sm75": "SHFL.BFLY",
    "grouped_topk_sm80": "REDUX.MAX",
    "linear_w8a8_sm80": "IMMA.16832.S8.S8",
    "grouped_linear_fp4_sm120": "OMMA.SF.16864",
    "grouped_linear_mxfp8_sm120": "QMMA.SF.16832",
    "linear_fp4_sm120": "OMMA.SF.16864",
    "linear_mxfp8_sm120": "QMMA.SF.16832",
    "moe_fp4_sm120": "OMMA.SF.16864",
    "moe_mxfp8_sm120": "QMMA.SF.16832",
}
"""A kernel -> its instruction."""
QUICK = ("linear_w4a16_decode_sm80", "sm_121")


@needs_assembler
@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(name, arch, marks=() if (name, arch) == QUICK else pytest.mark.slow)
        for name, entry in BASELINE.items()
        for arch in entry["on"]
    ],
)
def test_an_instance_is_assembled_with_the_spills_on_record(name: str, arch: str) -> None:
    """The first of a source. tests/kernels/test_*_sm80.py read all instances, on some targets."""
    entry = BASELINE[name]
    family = "f" if entry["source"].endswith("f") else ""
    used, code = assembled(entry["source"], arch + family, entries(entry["source"])[:1])
    ((registers, stack),), (text,) = used.values(), code.values()
    assert registers <= 255 and stack <= entry.get("spills", {}).get(arch, 0), (registers, stack)
    expected = products_of(name, arch)
    assert expected in text, "tensor cores, or reductions"
    if name.startswith("grouped_topk"):
        assert registers <= 128 and ("REDUX" in text) == (name == "grouped_topk_sm80")
    elif name.endswith("_sm75"):
        assert "16816.F32" not in text and "LDGSTS" not in text, "what Turing lacks"
    else:
        assert "LDGSTS" in text, "cp.async"


def products_of(name: str, arch: str) -> str:
    """The instruction of the tensor cores, or of reductions.

    Only sm_89 and the sm_120 family multiply e4m3 by mma.sync; for others its codes become fp16.
    """
    if name.startswith("grouped_topk"):
        return PRODUCTS[name]
    if name == "linear_w8a8_sm75":
        blackwell = ("sm_100", "sm_103", "sm_120", "sm_121")
        return "IMMA.16816.S8.S8" if arch in blackwell else "IMMA.8816.S8.S8"
    if name.endswith("_sm75"):
        return "HMMA.1688.F32"
    if name == "linear_w8a8_sm89" and arch in ("sm_89", "sm_120", "sm_121"):
        return "QMMA.16832.F32.E4M3.E4M3"
    return PRODUCTS.get(name, "HMMA.16816.F32")


def test_every_kernel_of_ptx_is_in_the_baseline_for_targets_that_run_it() -> None:
    """But the chains of experts whose products are grouped_linear's."""
    ptx = {name for name, kernel in KERNELS.items() if kernel.requires.code.startswith("cuda:compute_")}
    assert BASELINE.keys() == ptx - {"moe_sm75", "moe_sm80"}
    for name, entry in BASELINE.items():
        assert (ROOT / entry.get("executed", "tests")).exists()
        for arch in entry["on"]:
            assert not KERNELS[name].requires.check_hardware(Target.parse(arch)), (name, arch)


@pytest.mark.parametrize("name", ["paged_attention_sm80_split", "paged_attention_sm80_more_split"])
def test_spills_of_wide_heads_are_on_record(name: str) -> None:
    """The most that any instance of paged attention spills, on every target: those of decodes for heads of 256 elements over codes."""
    entry = BASELINE[name]
    assert entry["spills"] == dict.fromkeys(entry["on"], max(STACK_ON_RECORD.values()))
