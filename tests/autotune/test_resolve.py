"""Resolution in a real child process: records, quarantine of wrong and of crashing kernels, damaged stores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.autotune.resolve import Resolver
from gristmill.autotune.worker import Worker
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry

OP = default_registry().op("rms_norm")
PROBLEM = OP.problem("m=4,n=64,x=fp32")

SPEC = """
import os
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.requirement import Requirement
def wrong(config, x, weight, eps, out): out.zero_()
def crash(config, x, weight, eps, out): os.kill(os.getpid(), 11)
KERNELS = [Kernel(op="rms_norm", name=f"rms_norm_{f.__name__}", provider="test", language="python", priority=p,
                  target=f"{__name__}:{f.__name__}", requires=Requirement()) for f, p in ((wrong, 900), (crash, 800))]
"""

RUN = """
import json, sys, warnings
warnings.simplefilter("always")
from gristmill.autotune.resolve import Resolver
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
op = default_registry().op("rms_norm")
selection = Resolver("cpu", Policy(cache=sys.argv[1])).resolve(op, op.problem("m=4,n=64,x=fp32"))
print(json.dumps([c.as_dict() for c in selection.candidates]))
"""


def run_with_bad_kernels(tmp_path: Path) -> tuple[dict[str, dict], str]:
    """Resolve in a process in which two bad kernels outrank the good ones."""
    extra = tmp_path / "extra"
    extra.mkdir(exist_ok=True)
    (extra / "rms_norm_bad.py").write_text(SPEC)
    (tmp_path / "sitecustomize.py").write_text(
        f"import gristmill.kernels.norm as family\nfamily.__path__.append({str(extra)!r})\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run([sys.executable, "-c", RUN, str(tmp_path / "cache")], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": path})  # fmt: skip
    return {row["kernel"]: row for row in json.loads(done.stdout)}, done.stderr


def test_wrong_and_crashing_kernels_are_quarantined_and_the_next_one_runs(tmp_path: Path) -> None:
    rows, warned = run_with_bad_kernels(tmp_path)
    assert rows["rms_norm_wrong"]["verdict"] == rows["rms_norm_crash"]["verdict"] == "quarantined"
    assert "over the tolerance" in rows["rms_norm_wrong"]["reasons"][0]
    assert "killed its process" in rows["rms_norm_crash"]["reasons"][0]
    assert [row["kernel"] for row in rows.values() if row["verdict"] == "selected"] in (["rms_norm_cpu"], ["rms_norm_torch"])
    assert "quarantined" in warned
    again, warned = run_with_bad_kernels(tmp_path)
    assert again == rows and "quarantined" not in warned, "records are kept: nothing is verified twice"


def test_a_verified_kernel_is_not_verified_again(tmp_path: Path) -> None:
    class Refuses(Worker):
        def verify(self, *arguments: object) -> dict[str, object]:  # type: ignore[override]
            raise AssertionError("verified twice")

    policy = Policy(cache=str(tmp_path))
    first = Resolver("cpu", policy).resolve(OP, PROBLEM).require()
    assert first.verdict == "selected"
    assert Resolver("cpu", policy, worker=Refuses()).resolve(OP, PROBLEM).require().kernel.name == first.kernel.name


def test_a_damaged_store_is_left_alone_with_one_warning(tmp_path: Path) -> None:
    policy = Policy(cache=str(tmp_path))
    policy.store_path.write_text('{"schema": 1,\n"verified": [{}\n')
    with pytest.warns(RuntimeWarning, match=r"store.json: line \d+"):
        resolver = Resolver("cpu", policy)
    with pytest.warns(RuntimeWarning, match="cannot write the store"):
        assert resolver.resolve(OP, PROBLEM).best is not None
    assert policy.store_path.read_text().startswith('{"schema": 1,\n"verified": [{}')


WRITER = """
import sys
from pathlib import Path
from gristmill.autotune.store import save
from gristmill.kernel_registry.store import Timing
for index in range(20):
    save(Path(sys.argv[1]), [Timing(op="o", kernel=f"k{sys.argv[2]}", code="", config={}, problem=f"m={index}", target="t",
                                    toolchain="", us=1.0)])
"""


def test_eight_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, sys.path))
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "store.json"), str(number)],
                                env={**os.environ, "PYTHONPATH": path}) for number in range(8)]  # fmt: skip
    assert [writer.wait() for writer in writers] == [0] * 8
    assert len(json.loads((tmp_path / "store.json").read_text())["timed"]) == 160


def test_a_policy_level_is_the_level_that_runs(tmp_path: Path) -> None:
    resolver = Resolver("cpu", Policy(cache=str(tmp_path), cpu_level="base"))
    candidate = resolver.resolve(OP, PROBLEM).require()
    assert resolver.target.name == "cpu:base"
    if candidate.kernel.language == "cpp":
        assert candidate.config is not None and candidate.config["level"] == "base"
