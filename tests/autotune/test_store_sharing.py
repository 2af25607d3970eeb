"""One store shared by many processes: nothing that was saved is lost, also when a writer dies; without the
lock records are lost. Serving with a damaged store uses the defaults, with one warning.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.autotune.store import save
from gristmill.kernel_registry.store import Store, Timing
from tests import forked

EACH = 12
WRITER = """
import contextlib, sys, time
from pathlib import Path
from gristmill.autotune import store
from gristmill.kernel_registry.store import Timing

if "slow" in sys.argv:  # others come between reading and replacing, if they can
    replace = store._replace
    store._replace = lambda *given: (time.sleep(0.02), replace(*given))
if "unlocked" in sys.argv:
    store._locked = lambda path: contextlib.nullcontext()
    others = Path(sys.argv[1]).parent

    def together(*given):  # all have read when the first one replaces
        (others / f"{sys.argv[2]}.read").touch()
        while len([*others.glob("*.read")]) < 8:
            time.sleep(0.002)
        store._replace = replace
        replace(*given)

    store._replace = together
for index in range(int(sys.argv[3])):
    store.save(Path(sys.argv[1]), [Timing(op="o", kernel=f"k{sys.argv[2]}", code="", config={}, problem=f"m={index}", target="t",
                                          toolchain="", us=1.0)])
    print(index, flush=True)
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def eight(path: Path, *how: str) -> int:
    """Runs eight writers of EACH records concurrently. Returns how many records the store has then."""
    writers = [start(WRITER, path, number, EACH, *how) for number in range(8)]
    for writer in writers:
        _, stderr = writer.communicate(timeout=120)
        assert writer.returncode == 0, stderr
    return len(Store.read(path).timings)


def test_eight_slow_writers_lose_nothing(tmp_path: Path) -> None:
    assert eight(tmp_path / "store.json", "slow") == 8 * EACH


def test_without_the_lock_they_would(tmp_path: Path) -> None:
    """Planted fault: a check whose writers never meet would pass whatever the store does. These meet once."""
    assert eight(tmp_path / "store.json", "slow", "unlocked") < 8 * EACH


def test_a_writer_that_is_killed_loses_nothing_that_it_said_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    for number in range(4):
        writer = start(WRITER, path, number, 10_000)
        assert writer.stdout is not None
        saved = [int(writer.stdout.readline()) for _ in range(3 + number)]
        writer.send_signal(signal.SIGKILL)
        saved += map(int, writer.communicate(timeout=60)[0].split())
        stored = {t.problem for t in Store.read(path).timings if t.kernel == f"k{number}"}
        assert {f"m={index}" for index in saved} <= stored, "a save that returned is on the disk"
    assert eight(path) >= 8 * EACH, "and the lock of a dead process is nobody's"


SERVE = """
import torch, gristmill.ops as ops
for rows in (2, 5, 9):
    x, w = torch.randn(rows, 256), torch.rand(256)
    y, wanted = ops.rms_norm(x, w, 1e-5), torch.nn.functional.rms_norm(x, (256,), w, 1e-5)
    assert torch.allclose(y, wanted, atol=1e-5), (y - wanted).abs().max()
print("served")
"""


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        pytest.param(lambda text: text, 0, marks=pytest.mark.slow),
        (lambda text: text[: len(text) // 2], 6),
        pytest.param(lambda text: text.replace('"us": 5.0', '"us": "quick"'), 6, marks=pytest.mark.slow),
    ],
    ids=["whole", "truncated", "a word for a number"],
)
def test_serving_goes_on_from_defaults_with_one_warning(
    tmp_path: Path, damage: Callable[[str], str], line: int
) -> None:
    cache = tmp_path / "cache"
    store = cache / "store.json"
    save(
        store,
        [
            Timing(
                op="rms_norm",
                kernel="rms_norm_cpu",
                code="",
                config={},
                problem="m=4,n=64",
                target="t",
                toolchain="",
                us=5.0,
            )
        ],
    )
    store.write_text(damage(store.read_text()))
    damaged = store.read_text()
    (tmp_path / "policy.toml").write_text(f'cache = "{cache}"\n')
    environment = {**os.environ, "GRISTMILL_POLICY": str(tmp_path / "policy.toml")}
    serving = forked.run("-c", SERVE, env=environment)
    stderr = serving.stderr
    assert serving.returncode == 0 and serving.stdout == "served\n", stderr
    warned = [text for text in stderr.splitlines() if "Warning" in text]
    if line:
        assert (
            len(warned) == 1
            and f"store.json: line {line}" in warned[0]
            and "nothing will be recorded" in warned[0]
        ), stderr
        assert store.read_text() == damaged
    else:
        assert not warned and json.loads(store.read_text())["verified"], "a whole store is written to"
