# ruff: noqa: F811  # fixtures
"""Which experts run on gristmill: by times beside vLLM's own method of a GPU, with a planted kernel, by a clock that both kernels move.

No step of the models runs, so this needs none of vLLM's kernels.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.forward_context import is_forward_context_available
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    CompressedTensorsMoEMethod,
)

from gristmill.autotune import clock
from gristmill.integrations import measured
from gristmill.integrations.experts import Experts
from gristmill.integrations.vllm import experts_trial, explain, linear, quantization
from gristmill.integrations.vllm.choice import Choice
from gristmill.integrations.vllm.experts import unserved_experts
from gristmill.integrations.vllm.experts_trial import name_of_experts
from gristmill.integrations.vllm.quantization import GristmillConfig
from gristmill.integrations.vllm.trial import UntimedError
from gristmill.runtime.errors import UsageError
from tests.integrations.vllm.planted_marlin import Marlin
from tests.integrations.vllm.test_experts import (  # noqa: F401  # fixtures too
    alone,
    check_products,
    expert_rows,
    load,
    routed,
    taken,
)
from tests.integrations.vllm.test_quantization import qwen, written  # noqa: F401  # a fixture

Load = Callable[..., torch.nn.Module]
SECONDS = [0.0]
OURS = 0.01
"""Seconds that a call of ours takes; of vLLM's a test says it."""
FIGURES = "us of gristmill and of the host by tokens: 1: 10000.0 and "


@pytest.fixture
def marlin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: dict[str, str]) -> Marlin:
    """vLLM's kernel, for a user with an empty store, whose linear layers are all taken untimed. It takes twice as long as ours."""
    call = Experts.__call__

    def ours(self: Experts, *inputs: Tensor) -> Tensor:
        SECONDS[0] += OURS
        return call(self, *inputs)

    policy = tmp_path / "policy.toml"
    policy.write_text(f'cache = "{tmp_path / "cache"}"\n')
    monkeypatch.setenv("GRISTMILL_POLICY", str(policy))
    for place, name, value in (
        (Experts, "__call__", ours),
        (clock, "now", lambda: SECONDS[0]),
        (measured, "_KNOWN", {}),
        (measured, "ROUNDS", 1),
        (measured, "list_count", lambda size, device: 2),
        (linear, "choose", lambda *_: Choice(None)),
    ):
        monkeypatch.setattr(place, name, value)
    planted = Marlin(monkeypatch, SECONDS)
    planted.seconds = 2 * OURS
    return planted


@pytest.fixture
def folder(qwen: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    form = getattr(request, "param", "compressed-tensors")
    return written(qwen, tmp_path / "quantized", "int4_g128", form)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process knows nothing; it must not measure."""

    def never(*arguments: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(measured, "_KNOWN", {})
    monkeypatch.setattr(measured, "_measure", never)


def test_experts_that_are_faster_are_taken(
    marlin: Marlin,
    load: Load,
    folder: Path,
    qwen: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load(folder)
    rows = expert_rows()
    assert [row["taken"] for row in rows] == [True, True] and marlin.packed == 2 * 2, rows
    assert all(row["measured"].startswith(f"{FIGURES}20000.0, 16: ") for row in rows), rows
    assert "gristmill_left_to_vllm" not in model.vllm_config.additional_config
    check_products(taken(model), qwen)

    forget(monkeypatch)
    load(folder)
    assert expert_rows() == rows


@pytest.mark.parametrize("folder", ["compressed-tensors", "gptq"], indirect=True)
def test_experts_that_are_not_faster_are_left_to_vllm(
    marlin: Marlin,
    load: Load,
    folder: Path,
    qwen: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its own method, whose products are right, although its twin had other weights. The next start measures nothing."""
    marlin.seconds = 0.0099
    model = load(folder)
    rows = expert_rows()
    assert not any(row["taken"] for row in rows) and marlin.packed == 2 * (2 + 2), rows
    reason = f"it is not faster on gristmill: {FIGURES}9900.0, 16: "
    assert all(row["reason"].startswith(reason) for row in rows), rows
    assert not taken(model) and len(routed(model)) == 2
    assert model.vllm_config.additional_config["gristmill_left_to_vllm"] == ["int4_g128 8x128x256 top 2"]
    check_products(routed(model), qwen)

    forget(monkeypatch)
    load(folder)
    assert expert_rows() == rows


def test_all_are_taken_untimed_on_request(
    marlin: Marlin, load: Load, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marlin.seconds = 0.0
    forget(monkeypatch)
    assert len(taken(load(folder, take="all"))) == 2 and marlin.packed == 0
    assert [(row["taken"], row["measured"]) for row in expert_rows()] == [(True, "")] * 2


def test_what_vllm_cannot_compute_is_taken(marlin: Marlin, load: Load, folder: Path) -> None:
    marlin.error = NotImplementedError("no such kernel")
    assert len(taken(load(folder))) == 2
    reason = "vLLM's own method does not serve it: NotImplementedError: no such kernel"
    assert {row["measured"] for row in expert_rows()} == {reason}


@pytest.mark.parametrize("place", ["made", "called"])
def test_an_assertion_of_a_method_is_a_refusal(
    place: str, marlin: Marlin, load: Load, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is made, as any other error, and in its first call. With its source where it has no text."""
    of_vllm = GristmillConfig._of_vllm

    def refuse(self: Any, layer: Any, prefix: str) -> Any:
        if prefix.endswith("experts"):
            raise AssertionError
        return of_vllm(self, layer, prefix)

    if place == "made":
        monkeypatch.setattr(GristmillConfig, "_of_vllm", refuse)
    else:
        marlin.error = AssertionError("groups of 128")
    assert len(taken(load(folder))) == 2
    said = {"made": "raise AssertionError", "called": "groups of 128"}[place]
    reason = f"vLLM's own method does not serve it: AssertionError: {said}"
    assert {row["measured"] for row in expert_rows()} == {reason}


@pytest.mark.parametrize(
    "error", [KeyError("ScalarType"), torch.OutOfMemoryError("CUDA out of memory")], ids=str
)
def test_a_method_that_cannot_be_made(
    error: Exception, marlin: Marlin, load: Load, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor can vLLM make it then, unless it has more memory."""

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(GristmillConfig, "_of_vllm", fail)
    if isinstance(error, KeyError):
        assert len(taken(load(folder))) == 2
        assert {row["measured"].partition(": ")[2] for row in expert_rows()} == {"KeyError: 'ScalarType'"}
    else:
        with pytest.raises(torch.OutOfMemoryError):
            load(folder)


def test_what_only_gristmill_reads_is_taken(
    load: Load, qwen: Path, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear layers too. One without a kernel is one error."""
    folder = written(qwen, tmp_path / "quantized", "int4_g128", "gristmill")
    forget(monkeypatch)
    model = load(folder)
    said = "vLLM does not read checkpoints of gristmill"
    rows = [row for row in explain() if row["scheme"] == "int4_g128"]
    assert len(taken(model)) == 2 and len(rows) == 2 * 3
    assert all(row["taken"] and row["measured"].endswith(said) for row in rows), rows

    monkeypatch.setattr(quantization, "unserved_experts", lambda *_: "planted")
    with pytest.raises(UsageError, match=f"^model.layers.0.mlp.experts: {said}$"):
        load(folder)


def test_an_assertion_while_vllm_is_timed_is_not_a_refusal(
    marlin: Marlin, load: Load, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        marlin.error = AssertionError("planted")
        return timed(*arguments)

    timed = measured._step
    monkeypatch.setattr(measured, "_step", fail)
    with pytest.raises(AssertionError, match="planted"):
        load(folder)


def test_a_failure_while_vllm_is_timed_is_not_a_refusal(marlin: Marlin, load: Load, folder: Path) -> None:
    marlin.error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as raised:
        load(folder)
    assert '"take": "all"' in raised.value.__notes__[0]


def test_a_method_that_chooses_experts_itself_is_left_untimed(
    marlin: Marlin, load: Load, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time would include the choice, ours not."""
    monkeypatch.setattr(FusedMoEMethodBase, "is_monolithic", property(lambda self: True))
    forget(monkeypatch)
    assert len(routed(load(folder))) == 2
    reason = "vLLM's own method cannot be timed beside gristmill's kernel: it chooses the experts itself"
    assert [(row["taken"], row["reason"]) for row in expert_rows()] == [(False, reason)] * 2


def test_ranks_that_exchange_tokens_are_not_timed() -> None:
    parallel = SimpleNamespace(dp_size=2)
    layer = SimpleNamespace(moe_config=SimpleNamespace(moe_parallel_config=parallel))
    with pytest.raises(UntimedError, match="with data parallelism it exchanges tokens between ranks"):
        name_of_experts(layer, lambda _: None)


def test_weights_of_routers_on_the_inputs_are_vllms() -> None:
    layer = SimpleNamespace(moe_config=None, apply_router_weight_on_input=True)
    reason = unserved_experts(layer, "int4_g128", torch.device("cpu"))
    assert reason == "the router's weights multiply the inputs of experts"


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[Any], Callable[[], None]]]:
    """Checks of the layers that vLLM makes: called before the choice, each returns what is called after it."""
    checks: list[Callable[[Any], Callable[[], None]]] = []
    choose = quantization.faster_experts

    def checked(layer: Any, *rest: Any) -> Choice:
        after = [check(layer) for check in checks]
        choice = choose(layer, *rest)
        for check in after:
            check()
        return choice

    monkeypatch.setattr(quantization, "faster_experts", checked)
    return checks


def test_a_trial_changes_nothing_of_the_layer(
    marlin: Marlin, load: Load, folder: Path, around: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although vLLM's method rounds the sizes up, for which the inputs are padded."""
    checked = []

    def check(layer: Any) -> Callable[[], None]:
        bias = torch.nn.Parameter(torch.ones(8), requires_grad=False)
        layer.register_parameter("bias_of_the_choice", bias)
        fields, sizes = dict(layer.__dict__), dict(layer.moe_config.__dict__)
        names = [set(layer.__dict__[kind]) for kind in ("_parameters", "_buffers", "_modules")]

        def after() -> None:
            assert layer.__dict__ == fields and layer.moe_config.__dict__ == sizes
            assert [set(fields[kind]) for kind in ("_parameters", "_buffers", "_modules")] == names
            assert layer.bias_of_the_choice is bias and (bias == 1).all()
            checked.append(layer)

        return after

    around.append(check)
    monkeypatch.setattr(
        CompressedTensorsMoEMethod, "maybe_roundup_sizes", lambda self, h, i, *_: (h + 128, i + 128)
    )
    assert len(taken(load(folder))) == len(checked) == 2
    assert all(row["measured"].startswith(FIGURES) for row in expert_rows()), expert_rows()


def test_vllm_computes_as_in_a_step(
    marlin: Marlin, load: Load, folder: Path, around: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many tokens as are timed, although its own steps have less."""
    found, call = set(), Marlin.__call__

    def noted(
        self: Marlin, experts: Any, output: Tensor, hidden_states: Tensor, *rest: Any, **named: Any
    ) -> None:
        fits = experts.moe_config.max_num_tokens >= len(hidden_states)
        found.add((len(hidden_states), is_forward_context_available(), fits))
        call(self, experts, output, hidden_states, *rest, **named)

    def check(layer: Any) -> Callable[[], None]:
        layer.moe_config.max_num_tokens = 256
        return lambda: None

    around.append(check)
    monkeypatch.setattr(Marlin, "__call__", noted)
    load(folder)
    assert found == {(size, True, True) for size in measured.SIZES}


def test_the_memory_of_a_race_is_free_after_it(
    marlin: Marlin, load: Load, folder: Path, around: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: not at the next garbage collection."""
    twins, twin_of = [], experts_trial.twin_of

    def noted(layer: Any) -> Any:
        twin = twin_of(layer)
        twins.append(weakref.ref(twin))
        return twin

    def check(layer: Any) -> Callable[[], None]:
        gc.disable()

        def after() -> None:
            alive = [twin for twin in twins if twin() is not None]
            gc.enable()
            assert twins and not alive

        return after

    around.append(check)
    monkeypatch.setattr(experts_trial, "twin_of", noted)
    load(folder)
    assert len(twins) == (1 + 2) + 1  # for its name, each layer; and for the copies
