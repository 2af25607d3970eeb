"""Compiled Triton code below the policy's cache is found by later processes, and counted; what is compiled in a step is late."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gristmill.autotune import compilations
from gristmill.autotune.compilations import CACHE_VARIABLE, keep_below
from gristmill.kernel_registry.policy import Policy
from tests import forked

KERNEL = """
import json, os, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gristmill.autotune.compilations import keep_below, total, watch
from gristmill.kernel_registry.policy import Policy

heard = []
triton.knobs.compilation.listener = lambda **event: heard.append(event["cache_hit"])

@triton.jit
def double(x, BLOCK: tl.constexpr):
    at = x + tl.arange(0, BLOCK)
    tl.store(at, 2 * tl.load(at))

found = []
for folder in sys.argv[1:]:
    os.environ.pop("TRITON_CACHE_DIR", None)
    keep_below(Policy(cache=folder))
    watch("triton"), watch("triton")
    source = ASTSource(fn=double, signature={"x": "*fp32", "BLOCK": "constexpr"}, constexprs={(1,): 16})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
    found.append([*total()])
print(json.dumps([found, heard]))
"""


def test_a_later_process_finds_compiled_code(tmp_path: Path) -> None:
    script = tmp_path / "kernel.py"
    script.write_text(KERNEL)
    env = {
        name: value for name, value in os.environ.items() if name not in (CACHE_VARIABLE, "TRITON_INTERPRET")
    }

    def run(*folders: str) -> object:
        done = forked.run(str(script), *(str(tmp_path / name) for name in folders), env=env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert run("image") == [[[1, 0]], [False]]
    assert any((tmp_path / "image" / "triton").rglob("double.cubin"))
    # Planted: in another folder nothing is found.
    assert run("image", "other") == [[[0, 1], [1, 1]], [True, False]]


def test_the_cache_goes_with_that_of_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    keep_below(Policy())
    assert CACHE_VARIABLE not in os.environ, "Triton's own place is left where none is named"
    monkeypatch.setenv(CACHE_VARIABLE, "/elsewhere")
    keep_below(Policy(cache=str(tmp_path)))
    assert os.environ[CACHE_VARIABLE] == "/elsewhere"
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.chdir(tmp_path)
    keep_below(Policy(cache="folder"))
    assert os.environ[CACHE_VARIABLE] == str(tmp_path / "folder" / "triton")


def test_a_listener_counts_and_passes_on() -> None:
    heard: list[object] = []
    before, mine = compilations.total(), compilations.of_this_thread()
    listener = compilations._Listener(lambda **event: heard.append(event["cache_hit"]))
    listener(metadata={"name": "a"}, cache_hit=False)
    listener(metadata={"name": "b"}, cache_hit=True)
    assert compilations.total() == (before.compiled + 1, before.reused + 1)
    assert compilations.names_since(mine) == ["a", "b"] and heard == [False, True]


PREPARE = """
import sys
from gristmill.autotune.compilations import prepare_triton
assert "triton" not in sys.modules
PLANTED
prepare_triton(device=DEVICE)
key = sys.modules["triton.runtime.cache"].triton_key if sys.modules.get("triton") else None
print(key and key.cache_info().currsize)
"""


@pytest.mark.parametrize(
    ("device", "planted", "hashed"),
    [
        (False, "", 1),
        (True, "", 1),  # there is no driver: the rest is done
        (True, "sys.modules['triton'] = None", None),  # it is not installed
        (True, "import triton.compiler; del triton.compiler.make_backend", 0),  # another version
    ],
)
def test_what_triton_does_once_is_done_ahead(device: bool, planted: str, hashed: int | None) -> None:
    code = PREPARE.replace("PLANTED", planted).replace("DEVICE", str(device))
    done = forked.run("-c", code)
    assert (done.returncode, done.stdout) == (0, f"{hashed}\n"), done.stderr
