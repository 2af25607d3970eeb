"""The struct of a call: C reads what Python packs, and a library that was built from another declaration is refused."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.kernel_registry.arguments import Scalar
from gristmill.kernel_registry.call_struct import digest, fields, header
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels import native_call
from gristmill.kernels.native_call import CallEntry, Options
from gristmill.quant.native import NativeLibraryError

HEADERS = Path(__file__).resolve().parents[2] / "kernels" / "_native" / "calls"
OPS = default_registry().ops
RMS_NORM, PAGED = OPS["rms_norm"], OPS["paged_attention"]


def words(op: Op, call: Any, folder: Path) -> dict[str, list[Any]]:
    """Returns what C++ reads from the packed call: the values of each field."""
    source = [header(op), f'extern "C" void show(const Gm{op.Call.__name__}& c, double* to) {{']
    for field in fields(op):
        array = field.count > 1 or field.name.endswith("_stride")
        for place in [f"c.{field.name}[{i}]" for i in range(field.count)] if array else [f"c.{field.name}"]:
            value = f"reinterpret_cast<uintptr_t>({place})" if field.code[0] == "P" else place
            source.append(f"  *to++ = double({value});")
    path = folder / f"call_{op.name}"
    path.with_suffix(".cpp").write_text("\n".join([*source, "}"]))
    subprocess.run(
        ["g++", "-std=c++20", "-shared", "-fPIC", "-o", str(path), str(path.with_suffix(".cpp"))], check=True
    )
    values = (ctypes.c_double * sum(field.count for field in fields(op)))()
    ctypes.CDLL(str(path)).show(ctypes.c_char_p(CallEntry("gm_none", op.name).pack(call)), values)
    read = iter(values)
    return {field.name: [next(read) for _ in range(field.count)] for field in fields(op)}


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles the struct")
def test_cpp_reads_what_python_packs(tmp_path: Path) -> None:
    problem = PAGED.problem(
        "q_tokens=5,seqs=5,max_q=1,max_ctx=70,total_ctx=200,heads=8,kv_heads=2,head_dim=64,kv=fp8,kv_scale=token,softcap=true"
    )
    arguments = PAGED.inputs(problem, 0, "cpu")
    out = torch.empty(5, 8, 96, dtype=torch.bfloat16)[..., :64]
    call = PAGED.Call(*arguments, out)
    read = words(PAGED, call, tmp_path)
    assert read["q"] == [call.q.data_ptr()] and read["q_stride"] == list(call.q.stride()[:2])
    assert read["out_stride"] == [768, 96] and read["k_cache_stride"] == list(call.k_cache.stride()[:3])
    assert read["sinks"] == read["lse"] == read["workspace"] == read["workspace_bytes"] == [0]
    assert read["scale"] == [call.scale] and read["softcap"] == [call.softcap] != [0]
    sizes = ("q_tokens", "heads", "head_dim", "kv_heads", "seqs", "block_size")
    assert [read[name] for name in sizes] == [[5], [8], [64], [2], [5], [call.k_cache.shape[1]]]
    assert read["x_type"] == [2] and read["kv_type"] == [3]
    x = torch.randn(2, 3, 10)[..., :8]
    rows = words(RMS_NORM, RMS_NORM.Call(x, torch.ones(8), 1e-5, torch.empty(2, 3, 8)), tmp_path)
    assert (rows["m"], rows["n"], rows["x_stride"], rows["out_stride"]) == ([6], [8], [10], [8])


def test_another_declaration_has_another_digest() -> None:
    more = replace(RMS_NORM, arguments=(*RMS_NORM.arguments, Scalar("factor", "float", 1.0)))
    assert digest(more) != digest(RMS_NORM) and "double factor;" in header(more)
    assert len({digest(op) for op in OPS.values()}) == len(OPS)


def test_a_library_of_another_declaration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    entry, call = (
        CallEntry("gm_rms_norm", "rms_norm"),
        RMS_NORM.Call(torch.ones(1, 8), torch.ones(8), 1e-5, torch.ones(1, 8)),
    )
    monkeypatch.setattr(native_call, "digest", lambda op: digest(op) + 1)
    with pytest.raises(
        NativeLibraryError, match="built from another declaration of rms_norm.*make generate build"
    ):
        entry.cpu({"level": "base"}, call)
    monkeypatch.undo()
    entry.cpu({"level": "base"}, call)
    with pytest.raises(NativeLibraryError, match="gm_rows16_product__base.*takes no call of rms_norm"):
        CallEntry("gm_rows16_product", "rms_norm").cpu({"level": "base"}, call)


@pytest.mark.parametrize("op", sorted(path.stem for path in HEADERS.glob("*.h")))
def test_names_are_distinct(op: str) -> None:
    names = [field.name for field in fields(OPS[op])]
    assert len(names) == len(set(names))


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles the struct")
def test_a_choice_is_an_enumerator(tmp_path: Path) -> None:
    op = OPS["grouped_topk"]
    assert "enum class Scoring : int64_t { sigmoid, softmax } scoring;" in header(op)
    call = op.Call(torch.zeros(1, 4), 2, scoring="softmax", weights=torch.zeros(1, 2), ids=torch.zeros(1, 2))
    read = words(op, call, tmp_path)
    assert read["scoring"] == [1] and read["bias"] == [0] and read["e"] == [4]


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles the struct")
def test_weights_have_sizes_and_dtypes(tmp_path: Path) -> None:
    """The size of a tensor that is not contiguous is -1."""
    op = OPS["linear"]
    weight = [torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(0), torch.zeros(4, 4).t()]
    read = words(op, op.Call(torch.zeros(1, 4), weight, out=torch.zeros(1, 2)), tmp_path)
    assert read["weight"] == [weight[0].data_ptr(), 0, weight[2].data_ptr(), 0, 0, 0]
    assert read["weight_size"] == [6, 0, -1, 0, 0, 0] and read["weight_type"] == [6, 0, 0, -1, -1, -1]


def test_options_are_named_by_the_library() -> None:
    options = Options("tile, parts")
    assert options.names == ("tile", "parts")
    assert options.pack({"parts": 2, "tile": True, "other": "x"}) == bytes([1, *[0] * 7, 2, *[0] * 7])
    assert Options("").names == ()


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles the entry")
def test_an_entry_gets_options_out_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "entry.cpp"
    source.write_text(
        '#include "gm_cpu.h"\n#include "calls/rms_norm.h"\n'
        "GM_CPU_CALL(gm_rms_norm, RmsNorm, rows, fast)(const GmRmsNormCall& call, const gm_rms_norm_options& options) {\n"
        "  return options.rows == call.m && options.fast == 1 ? GM_OK : GM_E_ARG;\n}\n"
    )
    flags = ["-std=c++20", "-shared", "-fPIC", "-Wno-psabi", "-DGM_LEVEL=base", f"-I{HEADERS.parent}"]
    sources = [str(source), str(HEADERS.parent / "call_list.cpp")]
    subprocess.run(["g++", *flags, *sources, "-o", str(tmp_path / "entry.so")], check=True)
    library = ctypes.CDLL(str(tmp_path / "entry.so"))
    monkeypatch.setattr(native_call, "cpu_library", lambda: library)
    monkeypatch.setattr(native_call, "cpu_function", lambda name, level, types: library[f"{name}__{level}"])
    entry = CallEntry("gm_rms_norm", "rms_norm")
    call = entry.op.Call(torch.zeros(2, 3), torch.ones(3), 0.5, torch.zeros(2, 3))
    entry.cpu({"level": "base", "rows": 2, "fast": True}, call)
    with pytest.raises(ValueError, match=r"rms_norm \(gm_rms_norm\): an argument out of its range"):
        entry.cpu({"level": "base", "rows": 7, "fast": True}, call)
