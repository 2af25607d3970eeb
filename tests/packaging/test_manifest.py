"""The manifest entries that a build writes per source, on small sources made for the test. No GPU is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gristmill.kernel_registry.closure import Sources, read_file
from gristmill.kernel_registry.native_sources import Compiled, built_sources, sources_in

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("ninja") is None, reason="cmake and ninja"
)


class Tree:
    """Two cores that share a header and of which one calls the other, and a separate one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.build = folder, folder / "build"
        self.write("shared.h", '#include "gm_cpu.h"\n')
        self.write("one.h", '#include "shared.h"\nextern "C" int GM_CAT(gm_test_two, GM_LEVEL)();\n')
        self.write("_one_cpu.cpp", self.core("one.h", "gm_test_one", "GM_CAT(gm_test_two, GM_LEVEL)()"))
        self.write("_two_cpu.cpp", self.core("shared.h", "gm_test_two", "0"))
        self.write("_apart_cpu.cpp", self.core("gm_cpu.h", "gm_test_apart", "0"))

    @staticmethod
    def core(header: str, entry: str, returned: str) -> str:
        return f'// gm-levels: base\n#include "{header}"\nGM_KERNEL({entry})() {{ return {returned}; }}\n'

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def make(self, *options: str) -> dict[str, Compiled]:
        """Configures as a wheel build does, builds, and returns the manifest by file name."""
        sources = ";".join(str(self.folder / f"_{name}_cpu.cpp") for name in ("one", "two", "apart"))
        command = ["cmake", "-S", ROOT, "-B", self.build, "-G", "Ninja", "-DSKBUILD_STATE=wheel"]
        command += [
            "-DGRISTMILL_CUDA=off",
            "-DGRISTMILL_HIP=off",
            f"-DGRISTMILL_CPU_SOURCES={sources}",
            *options,
        ]
        subprocess.run(command, check=True, capture_output=True, env=os.environ)
        return self.rebuild()

    def rebuild(self) -> dict[str, Compiled]:
        subprocess.run(["cmake", "--build", self.build], check=True, capture_output=True)
        return {os.path.basename(source.name): source for source in built_sources(self.build / "_lib")}


def test_manifest_follows_sources_includes_and_flags(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    first = tree.make()
    assert {name: source.entries for name, source in first.items()} == {
        "_one_cpu.cpp": ("gm_test_one",),
        "_two_cpu.cpp": ("gm_test_two",),
        "_apart_cpu.cpp": ("gm_test_apart",),
        "threads.cpp": (),
    }
    threads = "kernels/_native/threads.cpp"
    assert set(first["_one_cpu.cpp"].links) == {threads, str(tmp_path / "_two_cpu.cpp")}
    assert first["_two_cpu.cpp"].links == (threads,)
    assert all(set(source.builds) == {"base"} for name, source in first.items() if name != "threads.cpp")

    assert (
        "no work to do"
        in subprocess.run(["cmake", "--build", tree.build], check=True, capture_output=True, text=True).stdout
    )
    tree.write("one.h", (tmp_path / "one.h").read_text() + "// edited\n")
    header = tree.rebuild()
    assert changed(first, header) == {"_one_cpu.cpp"}
    tree.write("shared.h", (tmp_path / "shared.h").read_text() + "// edited\n")
    assert changed(header, shared := tree.rebuild()) == {"_one_cpu.cpp", "_two_cpu.cpp"}

    flags = tree.make("-DCMAKE_CXX_FLAGS=-fno-unroll-loops")
    assert changed(shared, flags) == set(), "the text is the same"
    assert all(flags[name].builds != source.builds for name, source in shared.items())

    tree.write("one.h", "#error broken\n")
    with pytest.raises(subprocess.CalledProcessError):
        tree.rebuild()
    assert (
        changed(flags, {os.path.basename(s.name): s for s in built_sources(tree.build / "_lib")}) == set()
    ), "a library that was not replaced keeps its manifest"


def test_a_generated_source_has_the_digest_of_its_template(tmp_path: Path) -> None:
    """CMake, which knows the origin of an instance, and Python, which has only the template, agree."""
    kernels = tmp_path / "kernels" / "mix"
    (tmp_path / "kernels" / "_native").mkdir(parents=True)
    kernels.mkdir()
    for name in ("threads.cpp", "cuda_driver.cpp"):
        (tmp_path / "kernels" / "_native" / name).touch()
    template = kernels / "_mix_sm90.cu.in"
    template.write_text(
        '// gm-table: rows.csv\n#define GM_ENTRY gm_mix_@form@\n#include "decode.h"\nGM_CUDA_ENTRY(GM_ENTRY)() {}\n'
    )
    (kernels / "rows.csv").write_text("a\n")
    (kernels / "decode.h").write_text("#pragma once\n")
    build = tmp_path / "build"
    build.mkdir()
    instance = build / "_mix_a_sm90.cu"
    instance.write_text('extern "C" int gm_mix_a() { return 0; }\n')
    subprocess.run(["c++", "-x", "c++", "-c", instance, "-o", build / "a.o"], check=True)
    (build / "base.json").write_text("{}")
    variables = {
        "GM_BUILDS": "sm_90a;own_cuda",
        "GM_SOURCES_sm_90a": instance,
        "GM_OBJECTS_sm_90a": build / "a.o",
        "GM_COMPILED_sm_90a": "nvcc -O3",
        f"GM_ORIGIN_{instance}": f"{template};{kernels / 'rows.csv'}",
        "GM_SOURCES_own_cuda": "kernels/_native/cuda_driver.cpp",
        "GM_ROOT": tmp_path,
        "GM_BINARY_DIR": build,
        "GM_NM": shutil.which("nm"),
        "GM_BASE": build / "base.json",
        "GM_MANIFEST": build / "manifest.json",
    }
    (build / "compiled.cmake").write_text(
        "".join(f'set("{name}" "{value}")\n' for name, value in variables.items())
    )
    script = ROOT / "cmake" / "digests.cmake"
    subprocess.run(["cmake", f"-DGM_COMPILED={build / 'compiled.cmake'}", "-P", script], check=True)
    built = {source.name: source for source in built_sources(build)}["_mix_a_sm90.cu"]
    read = {source.name: source for source in sources_in(str(tmp_path), read_file)}[
        "kernels/mix/_mix_sm90.cu.in"
    ]
    assert built.closure == read.closure and built.links == read.links
    assert built.entries == ("gm_mix_a",) and read.entries == ("gm_mix_*",)


def changed(before: dict[str, Compiled], after: dict[str, Compiled]) -> set[str]:
    return {name for name, source in after.items() if source.closure != before[name].closure}


def test_what_was_built_here_is_what_is_read_here() -> None:
    """CMake, which inspects the objects, and Python, which reads text, agree on every source that is
    unchanged since the build."""
    built = {source.name: source for source in Sources().built()}
    if not built:
        pytest.skip("the libraries here were built by something older")
    present = {source.name: source for source in Sources().present()}
    same = [name for name in built if name in present and present[name].closure == built[name].closure]
    assert same, "nothing here was built of the present sources: make build"
    for name in same:
        assert present[name].links == built[name].links, name
        if name not in ("kernels/_native/threads.cpp", "kernels/_native/cuda_driver.cpp"):
            assert present[name].entries == built[name].entries, name
