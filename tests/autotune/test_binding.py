"""Plans and their handles: shared, equal in every process, released; preparing and sealing; serving measures
nothing."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from gristmill import (
    LinearWeight,
    Policy,
    QuantScheme,
    SamplingParams,
    Target,
    UnpreparedError,
    ops,
    quantize,
)
from gristmill.autotune import binding
from gristmill.autotune.binding import PLANS
from gristmill.autotune.resolve import Resolver
from gristmill.kernel_registry import UnknownError, default_registry
from gristmill.runtime import SchedulerConfig
from tests import forked
from tests.runtime.oracle import LLAMA, MODELS

NORM = "n=64,x=fp32"


@pytest.fixture(autouse=True)
def own_policy(policy_file) -> None:
    policy_file()


def fresh(code: str) -> str:
    """Returns what a new process prints, under the same policy."""
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "random"},
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_the_same_plan_has_one_handle() -> None:
    plan = ops.bind("rms_norm", NORM, "cpu")
    second = ops.bind("rms_norm", "m=7,n=64,x=float32", torch.device("cpu"))
    assert second is plan and 0 < plan.handle < 1 << 63
    packed = "n=32,k=64,x=fp32,w=int4_g32"
    others = [
        plan,
        ops.bind("rms_norm", "n=65,x=fp32", "cpu"),
        ops.bind("rms_norm", NORM, "cpu", Policy(exclude=("*_triton",))),
        ops.bind("linear", packed, "cpu", layouts=frozenset({"plain_v1"})),
        ops.bind("linear", packed, "cpu", layouts=frozenset({"plain_v1", "cpu_rows16_v1"})),
        ops.bind("linear", "n=32,k=64,x=fp32,w=fp32", "cpu"),
    ]
    assert len({p.handle for p in others}) == len(others)


def test_a_quantized_weight_is_read_in_the_layout_that_it_is_packed_in_or_not_at_all() -> None:
    weight = quantize(torch.randn(32, 64), "int4_g32")
    stored = LinearWeight.pack(weight, ("plain_v1", "cpu_rows16_v1"))
    problem, x = stored.problem("float32"), torch.randn(2, 64)
    with pytest.raises(ValueError, match="a quantized weight needs the layouts that it is packed in"):
        ops.bind("linear", problem, "cpu")
    with pytest.raises(UnknownError, match="no layout called 'plain'"):
        ops.bind("linear", problem, "cpu", layouts="plain")
    for name, other in (("plain_v1", "cpu_rows16_v1"), ("cpu_rows16_v1", "plain_v1")):
        plan = ops.bind("linear", problem, "cpu", layouts=name)
        expected = x @ weight.dequantize().T
        torch.testing.assert_close(ops.linear(x, stored.tensors(name), n=32, plan=plan), expected)
        for wrong in (stored.tensors(other), stored.tensors(), stored.tensors(name)[:-1]):
            with pytest.raises(
                ValueError, match=rf"weight must be the {len(stored.tensors(name))} tensors of {name}"
            ):
                ops.linear(x, wrong, n=32, plan=plan)


def test_a_plan_without_layouts_takes_a_dense_weight_as_it_is() -> None:
    x, weight = torch.randn(3, 64), torch.randn(32, 64)
    plan = ops.bind("linear", "n=32,k=64,x=fp32,w=fp32", "cpu")
    assert plan is ops.bind("linear", "n=32,k=64,x=fp32,w=fp32", "cpu", layouts=("dense_v1",))
    torch.testing.assert_close(ops.linear(x, weight, plan=plan), x @ weight.T)


def test_handles_are_the_same_in_every_process() -> None:
    layouts = frozenset({"plain_v1", "cpu_rows16_v1"})
    handle = ops.bind("linear", "n=32,k=64,x=fp32,w=int4_g32", "cpu", layouts=layouts).handle
    code = (
        "from gristmill import ops; ops.bind('rms_norm', 'n=8', 'cpu');"
        "print(ops.bind('linear', 'n=32,k=64,x=fp32,w=int4_g32', 'cpu',"
        " layouts=frozenset({'cpu_rows16_v1', 'plain_v1'})).handle)"
    )
    assert fresh(code) == str(handle)


def test_layers_of_one_shape_make_one_graph() -> None:
    texts = []

    def backend(graph: torch.fx.GraphModule, example: object) -> object:
        texts.append(graph.print_readable(print_output=False).partition("forward")[2])
        return graph.forward

    for _ in range(2):
        torch._dynamo.reset()
        plan, weight = ops.bind("rms_norm", NORM, "cpu"), torch.rand(64)
        torch.compile(lambda x, w, p=plan: ops.rms_norm(x, w, 1e-5, plan=p), backend=backend)(
            torch.randn(3, 64), weight
        )
    assert len(texts) == 2 and texts[0] == texts[1] and str(plan.handle) in texts[0]


def test_a_plan_is_released_by_the_last_who_bound_it() -> None:
    x, weight = torch.randn(2, 64), torch.ones(64)
    plan = ops.bind("rms_norm", NORM, "cpu")
    assert ops.bind("rms_norm", NORM, "cpu") is plan
    handle = plan.handle
    ops.release(plan)
    assert torch.equal(torch.ops.gristmill.rms_norm(x, weight, 1e-5, handle), ops.rms_norm(x, weight, 1e-5))
    while plan.handle:  # a call without a plan binds this same plan
        ops.release(plan)
    with pytest.raises(ValueError, match=f"handle {handle} was released, or was never bound in this process"):
        torch.ops.gristmill.rms_norm(x, weight, 1e-5, handle)
    assert ops.bind("rms_norm", NORM, "cpu").handle == handle


def test_calls_without_a_plan_are_not_remembered_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "MOST_SIGNATURES", 3)
    monkeypatch.setattr(binding, "_AUTOMATIC", {})
    weight = torch.ones(64)
    for rows in (1, 2, 3, 4, 5, 1):
        ops.rms_norm(torch.randn(rows, 64), weight, 1e-5)
        assert len(binding._AUTOMATIC) <= 3


def test_prepare_covers_every_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `prepare` and `seal` no call verifies. A call of a size that was not prepared raises."""
    PLANS.clear()
    norm, gate = ops.bind("rms_norm", NORM, "cpu"), ops.bind("silu_and_mul", "n=64,x=fp32", "cpu")
    ops.prepare([1, 16])
    assert all(plan.entries[0] and plan.entries[4] and not plan.entries[1] for plan in (norm, gate))
    monkeypatch.setattr(Resolver, "verify", lambda *a: pytest.fail("verified"))
    ops.seal()
    x, weight = torch.randn(16, 64), torch.ones(64)
    torch.testing.assert_close(
        ops.rms_norm(x, weight, 1e-5, plan=norm), ops.rms_norm(x, weight, 1e-5, plan=norm)
    )
    late = ops.bind("rms_norm", "n=65,x=fp32", "cpu")
    assert not late.sealed and norm.sealed
    with pytest.raises(
        UnpreparedError, match=r"rms_norm m=2,n=64,x=fp32 was not prepared .* call gristmill.ops.prepare"
    ):
        ops.rms_norm(x[:2], weight, 1e-5, plan=norm)
    ops.seal(False)
    with pytest.raises(pytest.fail.Exception):
        ops.rms_norm(x[:2], weight, 1e-5, plan=norm)


def test_a_sealed_plan_runs_what_is_verified() -> None:
    PLANS.clear()
    plan = ops.bind("rms_norm", NORM, "cpu")
    op = plan.op
    problem = op.at_bucket(plan.static, 2)
    candidates = plan.resolver.select(op, problem).candidates
    slower = next(c for c in candidates if c.kernel.name == "rms_norm_torch")
    assert plan.resolver.verify(op, problem, slower).ok
    ops.seal()
    x, weight = torch.randn(2, 64), torch.ones(64)
    with pytest.warns(
        RuntimeWarning, match="it runs rms_norm_torch, which is verified; rms_norm_cpu is expected"
    ):
        y = ops.rms_norm(x, weight, 1e-5, plan=plan)
    torch.testing.assert_close(y, op.reference(x, weight, 1e-5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.rms_norm(x, weight, 1e-5, plan=plan)


def test_serving_measures_nothing(tmp_path: Path) -> None:
    """A host binds threads and shares the machine, so a time measured while serving would be wrong in the
    store."""
    model = MODELS / LLAMA
    code = (
        f"from gristmill import LLM, SamplingParams, ops; model = LLM({str(model)!r}, quant='int4_g128');"
        "ops.prepare([1, 4]); ops.seal();"
        "print(len(model.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=3))[0].token_ids));"
        "import sys; print(sorted(n for n in sys.modules if n.startswith('gristmill.')"
        " and n.rpartition('.')[2] in ('floor', 'timing', 'clock', 'gpu_clock', 'disturbance', 'reading')))"
    )
    process = forked.run("-c", code)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == ["3", "[]"]
    assert not list(tmp_path.rglob("ceilings.json"))
    records = json.loads((tmp_path / "cache" / "store.json").read_text(encoding="utf-8"))
    assert records["verified"] and records["timed"] == []


@pytest.mark.parametrize(
    "value",
    [
        Policy(pins={"linear": ("linear_cpu",)}),
        QuantScheme.parse("int4_g128"),
        Target.parse("h200"),
        SamplingParams(max_tokens=3),
        SchedulerConfig(num_blocks=8),
        default_registry().op("linear").problem("n=32,k=64,w=int4_g32"),
        Resolver("cpu", Policy()).plan(
            default_registry().op("silu_and_mul"), default_registry().op("silu_and_mul").problem("n=64"), [1]
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_configurations_cross_processes(value: object) -> None:
    assert pickle.loads(pickle.dumps(value)) == value


def test_a_quantized_weight_crosses_processes() -> None:
    stored = quantize(torch.randn(16, 64), "int4_g32")
    loaded = pickle.loads(pickle.dumps(stored))
    assert torch.equal(loaded.dequantize(), stored.dequantize())
