"""Structs of arguments: C lays them out as ctypes does, and a library that was built from another declaration is refused."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from gristmill.kernels import native
from gristmill.kernels.linear.dense_sm90.args import ARGS
from gristmill.quant.argument_struct import ArgumentStruct, check_struct, header
from gristmill.quant.native import NativeLibraryError

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path for folder in ("kernels", "quant") for path in (ROOT / folder).rglob("args.py"))
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def structs(module: Path) -> list[ArgumentStruct]:
    name = ".".join(module.relative_to(ROOT).with_suffix("").parts)
    values = vars(import_module(f"gristmill.{name}")).values()
    return [value for value in values if isinstance(value, ArgumentStruct)]


def library(folder: Path, text: str) -> ctypes.CDLL:
    (folder / "entry.cpp").write_text(text)
    command = ["g++", "-std=c++20", "-shared", "-fPIC", "entry.cpp", "-o", "entry.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "entry.so"))


def layout(struct: ArgumentStruct, definition: str, folder: Path) -> list[int]:
    """The offset and size of each field, and the size of the struct, as a C++ compiler has them."""
    names = [name for _, name in struct.fields]
    values = "".join(f"  *to++ = offsetof(S, {name}), *to++ = sizeof(S::{name});\n" for name in names)
    text = f"#include <cstddef>\n{definition}\nusing S = {struct.name};\n"
    text += f'extern "C" void show(long* to) {{\n{values}  *to = sizeof(S);\n}}\n'
    read = (ctypes.c_long * (2 * len(names) + 1))()
    library(folder, text).show(read)
    return list(read)


def of_python(struct: ArgumentStruct) -> list[int]:
    fields = [getattr(struct.new, name) for _, name in struct.fields]
    return [number for field in fields for number in (field.offset, field.size)] + [ctypes.sizeof(struct.new)]


@needs_compiler
@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_c_lays_out_the_fields_as_python_does(module: Path, tmp_path: Path) -> None:
    assert structs(module), "declares no struct"
    text = module.with_suffix(".h").read_text()
    for number, struct in enumerate(structs(module)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert layout(struct, text, folder) == of_python(struct)


@needs_compiler
def test_another_layout_is_seen(tmp_path: Path) -> None:
    """Planted: a field of another size."""
    text = header([ARGS]).replace("int32_t split;", "int64_t split;")
    assert text != header([ARGS]) and layout(ARGS, text, tmp_path) != of_python(ARGS)


@needs_compiler
def test_a_library_of_another_declaration_is_refused(tmp_path: Path) -> None:
    """Planted: two fields have changed places since the library was built."""
    former = ArgumentStruct("GmScaleArgs", "", "int32_t rows, columns;\nvoid* x;")
    now = ArgumentStruct("GmScaleArgs", "", "int32_t columns;\nint32_t rows;\nvoid* x;")
    text = f'{header([former])}\nextern "C" uint64_t args_of_gm_scale() {{ return GmScaleArgs::kDigest; }}\n'
    built = library(tmp_path, text)
    check_struct(built, "gm_scale", former)
    with pytest.raises(
        NativeLibraryError,
        match="another declaration of GmScaleArgs, which gm_scale takes.*make generate build",
    ):
        check_struct(built, "gm_scale", now)
    with pytest.raises(NativeLibraryError, match="gm_other of .* takes no GmScaleArgs; run `make build`"):
        check_struct(built, "gm_other", former)


def test_an_entry_is_checked_when_it_is_first_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(native, "cuda_function", lambda name, arch, types: len)
    monkeypatch.setattr(native, "cuda_library", lambda arch: None)
    monkeypatch.setattr(native, "check_struct", lambda library, name, struct: seen.append(name))
    struct = ArgumentStruct("GmScaleArgs", "", "int32_t rows;")
    assert native.cuda_entry("gm_scale", struct) is native.cuda_entry("gm_scale", struct) is len
    assert seen == ["gm_scale"]


def test_a_name_that_is_no_field_is_an_error() -> None:
    args = ARGS.new()
    assert args.x is None and args.m == 0
    with pytest.raises(AttributeError):
        args.rb = 1


@pytest.mark.parametrize("text", ["uint16_t x;", "int32_t x[2];", "int32_t;", "int32_t x y;"])
def test_a_declaration_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="GmArgs: cannot read the declaration"):
        _ = ArgumentStruct("GmArgs", "", text).fields
