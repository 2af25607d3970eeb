"""The rules of a closure, and what a kernel's two hashes depend on, on small source trees made for the test."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gristmill.kernel_registry import closure, native_sources
from gristmill.kernel_registry.closure import Sources
from gristmill.kernel_registry.native_sources import built_sources
from gristmill.kernel_registry.store import Store, Timing, config_key, config_of
from gristmill.kernel_registry.times import Times, of_present_code
from tests.registry import fakes

LAUNCHER = ("gristmill.kernels.mix.mix_cpu",)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of gristmill; a package `acme` lies beside it."""
    monkeypatch.setattr(closure, "_folders", lambda top: (str(tmp_path / top),))
    package = tmp_path / "gristmill"
    write(
        package,
        {
            "kernels/__init__.py": "",
            "kernels/mix/__init__.py": "",
            "kernels/mix/mix_cpu.py": 'from gristmill.kernels.native import cpu_function\nENTRY = "gm_mix"\n',
            "kernels/native.py": '"""cpu_function("gm_other")"""\n',
            "kernels/mix/_mix_cpu.cpp": '#include "mix.h"\nGM_KERNEL(gm_mix)() {}\n',
            "kernels/mix/mix.h": '#include "gm_cpu.h"\n',
            "kernels/mix/_other_cpu.cpp": '#include "other.h"\nGM_KERNEL(gm_other)() {}\n',
            "kernels/mix/other.h": '#include "gm_cpu.h"\n',
            "kernels/_native/gm_cpu.h": "#define GM_KERNEL(name) name\n",
            "kernels/_native/threads.cpp": '#include "torch_abi.h"\n',
            "kernels/_native/torch_abi.h": "",
            "kernels/_native/cuda_driver.cpp": "",
        },
    )
    return package


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def reached(*modules: str) -> set[str]:
    return {name for name, _ in Sources().reach(*modules).files}


def code(config: dict[str, object] | None = None, *, built: bool = False) -> str:
    return Sources().code_hash(LAUNCHER, config or {}, built)


def verification(config: dict[str, object] | None = None) -> str:
    return Sources().verification_hash(LAUNCHER, config or {})


def build(folder: Path, flags: str = "-O3") -> None:
    """Writes the manifest of a build of the present sources."""
    sources = {
        s.name: {
            "closure": s.closure,
            "entries": list(s.entries),
            "links": list(s.links),
            "builds": {level: f"{s.closure}{flags}{level}" for level in ("base", "avx2")},
        }
        for s in Sources().present()
    }
    write(folder, {"_lib/manifest.json": json.dumps({"version": "0", "sources": sources})})


def test_imports(folder: Path) -> None:
    write(
        folder,
        {
            "kernels/mix/mix_torch.py": (
                "from __future__ import annotations\n"
                "from typing import TYPE_CHECKING\n"
                "import torch, gristmill.kernels.plain as p\n"
                "from . import sibling\n"
                "from ..shared import (  # a comment (with brackets)\n    one as other,\n    two,\n)\n"
                "from gristmill.quant import made\n"
                "from gristmill.kernel_registry.kernel import Kernel\n"
                'TABLE = "table.json"\n'
                "if TYPE_CHECKING:\n    from gristmill.kernels import typed\n"
                "def launch():\n    from gristmill.kernels.mix import late\n"
                '"""\nfrom gristmill.kernels import quoted\n"""\n'
            ),
            "kernels/mix/table.json": "{}",
            "kernels/mix/other.json": "{}",
            "kernels/mix/late.py": "",
            "kernels/mix/sibling.py": "",
            "kernels/plain.py": "",
            "kernels/shared.py": "import gristmill.kernels.further\n",
            "kernels/further.py": "",
            "kernels/typed.py": "",
            "kernels/quoted.py": "",
            "quant/__init__.py": (
                "if TYPE_CHECKING:\n    from gristmill.quant.maker import makes as made\n"
                "    from gristmill.quant.unused import unused\n"
            ),
            "quant/maker.py": "",
            "quant/unused.py": "",
            "kernel_registry/__init__.py": "",
            "kernel_registry/kernel.py": "",
        },
    )
    assert reached("gristmill.kernels.mix.mix_torch") == {
        "kernels/__init__.py",
        "kernels/mix/__init__.py",
        "kernels/mix/mix_torch.py",
        "kernels/mix/table.json",
        "kernels/mix/late.py",
        "kernels/mix/sibling.py",
        "kernels/plain.py",
        "kernels/shared.py",
        "kernels/further.py",
        "quant/__init__.py",
        "quant/maker.py",
    }


def test_a_kernel_of_a_third_party_counts_its_own_package_and_what_it_takes_of_ours(folder: Path) -> None:
    write(
        folder.parent / "acme",
        {
            "__init__.py": "",
            "specs/__init__.py": "",
            "specs/mix.py": "from acme.code import run\nfrom gristmill.kernels.native import cpu_function\nimport numpy\n",
            "code.py": "",
            "unused.py": "",
        },
    )
    assert reached("acme.specs.mix") == {
        *(f"acme/{name}" for name in ("__init__.py", "specs/__init__.py", "specs/mix.py", "code.py")),
        "kernels/__init__.py",
        "kernels/native.py",
    }


def test_only_sources_of_named_entries_count_and_what_these_include(folder: Path) -> None:
    before = code()
    for name, counts in {
        "kernels/mix/_mix_cpu.cpp": True,
        "kernels/mix/mix.h": True,
        "kernels/_native/gm_cpu.h": True,
        "kernels/_native/threads.cpp": True,
        "kernels/_native/torch_abi.h": True,
        "kernels/_native/cuda_driver.cpp": False,
        "kernels/mix/_other_cpu.cpp": False,
        "kernels/mix/other.h": False,
    }.items():
        text = (folder / name).read_text()
        (folder / name).write_text(text + "// edited\n")
        assert (code() != before) == counts, name
        (folder / name).write_text(text)
    assert code() == before


def test_a_source_that_calls_an_entry_of_another_reaches_that_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mix = folder / "kernels/mix/_mix_cpu.cpp"
    mix.write_text(mix.read_text() + "int GM_CAT(gm_other, GM_LEVEL)();\n")

    def moves() -> bool:
        before = code()
        (folder / "kernels/mix/other.h").write_text(
            "// edited\n" + (folder / "kernels/mix/other.h").read_text()
        )
        return code() != before

    assert moves()
    monkeypatch.setattr(native_sources, "_NAME", re.compile("gm_nothing"))
    native_sources._read.cache_clear()
    assert not moves(), "the planted fault: links are not read"
    native_sources._read.cache_clear()


def test_placeholders_of_an_entry_are_filled_from_the_configuration(folder: Path) -> None:
    write(
        folder,
        {
            "kernels/mix/mix_cpu.py": "call = f\"gm_mix_{config['format']}_{rows}_sm90\"\n",
            "kernels/mix/_mix_a_sm90.cu": '#define GM_ENTRY gm_mix_a_few_sm90\n#include "entry.h"\n',
            "kernels/mix/_mix_b_sm90.cu": '#define GM_ENTRY gm_mix_b_few_sm90\n#include "entry.h"\n',
            "kernels/mix/entry.h": "GM_CUDA_ENTRY(GM_ENTRY)() {}\n",
        },
    )
    one, other, every = code({"format": "a"}), code({"format": "b"}), code()
    (folder / "kernels/mix/_mix_a_sm90.cu").write_text(
        '#define GM_ENTRY gm_mix_a_few_sm90\n#include "entry.h"\n// edited\n'
    )
    assert code({"format": "a"}) != one and code({"format": "b"}) == other and code() != every


def test_a_template_stands_for_its_instances(folder: Path) -> None:
    """A template counts with the table that fills it, for every entry name that the table can make."""
    write(
        folder,
        {
            "kernels/mix/mix_cpu.py": "call = f\"gm_mix_{config['format']}_sm90\"\n",
            "kernels/mix/deep/er/_mix_sm90.cu.in": (
                '// gm-table: rows.csv\n#define GM_ENTRY gm_mix_@format@_sm90\n#include "decode.cuh"\nGM_CUDA_ENTRY(GM_ENTRY)() {}\n'
            ),
            "kernels/mix/deep/er/rows.csv": "a\nb\n",
            "kernels/mix/deep/er/decode.cuh": "",
            "kernels/mix/deep/er/unused.cuh": "",
        },
    )
    before = code({"format": "a"})
    for name, counts in {
        "_mix_sm90.cu.in": True,
        "rows.csv": True,
        "decode.cuh": True,
        "unused.cuh": False,
    }.items():
        path = folder / "kernels/mix/deep/er" / name
        text = path.read_text()
        path.write_text(text + "// edited\n")
        assert (code({"format": "a"}) != before) == counts, name
        path.write_text(text)


def test_an_edit_counts_for_verifications_once_it_is_built(folder: Path) -> None:
    build(folder)
    hashes = code(), code(built=True), verification()
    assert hashes[0] == hashes[1], "a time measured with what is built is of the sources as they are"
    (folder / "kernels/_native/gm_cpu.h").write_text("#define GM_KERNEL(name) name##_\n")
    assert code() != hashes[0], "a time of the old code no longer counts as measured"
    assert (code(built=True), verification()) == hashes[1:], "what runs is still what was built"
    build(folder)
    assert code() == code(built=True) != hashes[1]
    assert verification() != hashes[2]


def test_flags_and_compiler_belong_to_verifications_alone(folder: Path) -> None:
    build(folder)
    hashes = code(), code(built=True), verification()
    build(folder, flags="-O2")
    assert (code(), code(built=True)) == hashes[:2]
    assert verification() != hashes[2]


def test_a_verification_is_of_one_code_level(folder: Path) -> None:
    build(folder)
    manifest = json.loads((folder / "_lib/manifest.json").read_text())
    before = {level: verification({"level": level}) for level in ("base", "avx2")}
    assert before["base"] != before["avx2"]
    manifest["sources"]["kernels/mix/_mix_cpu.cpp"]["builds"]["avx2"] = "other flags"
    write(folder, {"_lib/manifest.json": json.dumps(manifest)})
    assert verification({"level": "base"}) == before["base"]
    assert verification({"level": "avx2"}) != before["avx2"]


def test_a_wheel_has_the_hashes_of_the_checkout_that_it_was_made_of(folder: Path) -> None:
    build(folder)
    hashes = code(), code(built=True), verification({"level": "avx2"})
    for path in [*folder.rglob("*.cpp"), *folder.rglob("*.h")]:
        path.unlink()
    assert (code(), code(built=True), verification({"level": "avx2"})) == hashes


def test_a_manifest_of_a_build_that_named_no_sources_is_read(folder: Path) -> None:
    write(folder, {"_lib/manifest.json": '{"version": "0.1.0", "cpu_levels": ["base"]}'})
    assert built_sources(folder / "_lib") == ()
    before = code()
    assert code(built=True) == before
    (folder / "kernels/mix/mix.h").write_text("// edited\n")
    assert code(built=True) == code() != before, "nothing says what was built: the sources must do"


def test_times_count_as_measured_by_the_hash_of_the_sources() -> None:
    kernel = fakes.kernel("one")
    present = kernel.code_hash()
    for code_hash, source in ((present, "measured"), ("", "measured"), ("0123456789abcdef", "near")):
        timing = Timing(
            op="mix",
            kernel="one",
            code=code_hash,
            config={},
            problem=str(fakes.problem()),
            target=fakes.target_key(fakes.H200),
            toolchain=fakes.BUILD.key(),
            us=5.0,
        )
        store = Store()
        store.add(timing)
        assert of_present_code(kernel, timing) == (source == "measured")
        times = Times(fakes.OP, fakes.problem(), fakes.H200, fakes.BUILD, store)
        assert times.expected(kernel) == (5.0, source)


def test_the_text_of_a_configuration_gives_its_values_back() -> None:
    assert config_of(config_key({"level": "avx2", "block": 64})) == {"level": "avx2", "block": "64"}
    assert config_of("") == {}
