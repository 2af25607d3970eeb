"""What a build writes into its manifest of each source, on small sources made for it. No GPU is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gristmill.kernel_registry.closure import Sources
from gristmill.kernel_registry.native_sources import Compiled, built_sources

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("ninja") is None, reason="cmake and ninja"
)


class Tree:
    """Two cores that share a header, one of which calls the other, and one apart."""

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
        """Configure as a wheel build does, build, and read the manifest: by file name."""
        sources = ";".join(str(self.folder / f"_{name}_cpu.cpp") for name in ("one", "two", "apart"))
        command = ["cmake", "-S", ROOT, "-B", self.build, "-G", "Ninja", "-DSKBUILD_STATE=wheel"]
        command += ["-DGRISTMILL_CUDA=off", f"-DGRISTMILL_CPU_SOURCES={sources}", *options]
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


def changed(before: dict[str, Compiled], after: dict[str, Compiled]) -> set[str]:
    return {name for name, source in after.items() if source.closure != before[name].closure}


def test_what_was_built_here_is_what_is_read_here() -> None:
    """CMake, which asks the objects, and Python, which reads text, say the same of every source that has not changed since."""
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
