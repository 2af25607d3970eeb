"""CONTRIBUTING's recipe of an optional argument: its diff, applied to a copy of the tree, is small, right, and compiles."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).parents[2]
MOST_FILES = 12
GENERATED = {
    "docs/api.md",
    "docs/kernels.md",
    "kernel_registry/grades.json",
    "kernels/_native/calls/paged_attention.h",
    "kernels/calls.pyi",
    "src/gristmill/ops.pyi",
}
OUR_OWN = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
"""
"""A sitecustomize.py that imports gristmill from PYTHONPATH, whatever is installed in place."""

CHECK = """
from gristmill.autotune.device import device_target
from gristmill.autotune.verify import verify
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.attention.paged_attention import triton

registry = default_registry()
op, kernels = registry.op("paged_attention"), registry.kernels_of("paged_attention")
texts = [text for text in op.examples if "logit_scale=true" in text]
problem = op.problem("q_tokens=9,seqs=1,max_q=9,max_ctx=9,total_ctx=9,heads=4,kv_heads=2,logit_scale=true")
print(len(texts), *sorted(kernel.name for kernel in kernels if kernel.accepts(problem) is None))
refusals = {kernel.accepts(problem) for kernel in kernels} - {None}
assert refusals == {"does not support logit_scale"}, refusals

def outcomes(name):
    kernel = registry.kernel("paged_attention", name)
    config = kernel.config(problem, device_target("cpu", Policy()))
    return [verify(op, kernel, config, op.problem(text), "cpu") for text in texts]

for name in ("paged_attention_torch", "paged_attention_triton"):
    assert all(outcome.ok for outcome in outcomes(name)), outcomes(name)
launch = triton.launch
triton.launch = lambda config, call: launch(config, call.replace(logit_scale=None))
assert not any(outcome.ok for outcome in outcomes("paged_attention_triton")), "an ignored factor passes"
"""

INSTANCE = """
#include "attention/paged_attention/sm90/_paged_attention_sm90.cuh"
extern "C" __global__ void __launch_bounds__(gm::AttentionShape<64>::kThreads, 1)
    one(const __grid_constant__ gm::AttentionParams p, const __grid_constant__ CUtensorMap q,
        const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v,
        const __grid_constant__ gm::SoftCap<true> cap) {
  gm::paged_attention<__half, 64, gm::kBoxCopies, true, 2>(p, q, k, v, cap);
}
"""


def diffs(page: str) -> dict[str, str]:
    """Returns the diff blocks of a page, by the file that they change."""
    return dict(re.findall(r"```diff\n--- (\S+)\n(.*?)```", page, re.S))


def applied(name: str, text: str, diff: str) -> str:
    """Returns `text` after the hunks of `diff`, each of which must match one place."""
    lines = text.splitlines()
    for hunk in diff.split("@@\n")[1:]:
        marked = [(line[:1], line[1:]) for line in hunk.splitlines()]
        old, new = ([rest for mark, rest in marked if mark != left_out] for left_out in ("+", "-"))
        places = [place for place in range(len(lines)) if lines[place : place + len(old)] == old]
        if len(places) != 1:
            raise ValueError(f"{name} has {len(places)} places with\n" + "\n".join(old))
        lines[places[0] : places[0] + len(old)] = new
    return "\n".join([*lines, ""])


def environment_of(tree: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": f"{tree / 'site'}:{tree / 'src'}",
        "SKBUILD_EDITABLE_SKIP": str(ROOT / "build"),
        "TRITON_INTERPRET": "1",
        "XDG_CACHE_HOME": str(tree / "cache"),
    }


def run(tree: Path, *command: str) -> str:
    """Returns the output of Python in a copy of the tree."""
    environment = environment_of(tree)
    result = subprocess.run(
        [sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked files with the page's diff and with what `make generate` writes then."""
    copy = tmp_path_factory.mktemp("tree")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name, follow_symlinks=False)
    for name, diff in diffs((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")).items():
        path = copy / name
        path.write_text(applied(name, path.read_text(encoding="utf-8"), diff), encoding="utf-8")
    (copy / "site").mkdir()
    (copy / "site" / "sitecustomize.py").write_text(OUR_OWN)
    run(copy, "ci/generate.py")
    return copy


def test_the_diff_is_small(tree: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.split("\0") if name and not (ROOT / name).is_symlink()]
    changed = {name for name in names if (tree / name).read_bytes() != (ROOT / name).read_bytes()}
    by_hand = changed - GENERATED
    assert by_hand == diffs((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")).keys()
    assert len(by_hand) <= MOST_FILES and changed >= GENERATED


def test_kernels_that_name_the_argument_apply_it_and_others_refuse(tree: Path) -> None:
    kernels = ["paged_attention_sm90", "paged_attention_torch", "paged_attention_triton"]
    path = (tree / "site", tree / "src")
    result = forked.run("-c", OUR_OWN + CHECK, cwd=tree, env=environment_of(tree), path=path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["2", *kernels]


def test_the_tests_that_it_edits_pass(tree: Path) -> None:
    edited = ("tests/kernels/test_paged_attention.py", "tests/kernels/test_declarations.py")
    some = "float64 or describe_refuses or schemas or (declared_property and paged)"
    assert " passed" in run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *edited, "-k", some)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_the_cuda_sources_compile(tree: Path, tmp_path: Path) -> None:
    source = tmp_path / "one.cu"
    source.write_text(INSTANCE)
    include = ("-std=c++20", "-I", tree / "kernels", "-I", tree / "kernels" / "_native")
    entry = tree / "kernels" / "attention" / "paged_attention" / "sm90" / "_paged_attention_sm90.cu"
    warned = ("-Xcompiler", "-Wall,-Wextra,-Werror", "-DGM_CUBIN_SYMBOL=gm_cubin")
    for command in (
        ("nvcc", *include, "-arch=sm_90a", "-ptx", source, "-o", tmp_path / "one.ptx"),
        ("nvcc", "-x", "c++", *include, *warned, "-c", entry, "-o", tmp_path / "entry.o"),
    ):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


def test_a_hunk_that_matches_no_place_is_reported() -> None:
    assert applied("file", "a\nb\nc\n", "@@\n b\n+d\n@@\n-c\n+e\n") == "a\nb\nd\ne\n"
    for text in ("a\n", "b\nb\n", "ab\n"):
        with pytest.raises(ValueError, match="file has [02] places with\nb"):
            applied("file", text, "@@\n b\n+d\n")
