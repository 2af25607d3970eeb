"""New weights in the memory of the old ones: values, what stays as it was, refusals that change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gristmill.runtime.errors import CheckpointError, UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.weight_update import build_like, copy_weights, model_tensors
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS, NAMES, window

PROMPT = window(3, 60)
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0)


def answer(llm: LLM) -> tuple[tuple[int, ...], tuple[float, ...]]:
    [completion] = llm.generate([PROMPT], PARAMS)
    return completion.token_ids, tuple(token.logprob for token in completion.logprobs or ())


def tensors(name: str) -> dict[str, torch.Tensor]:
    """The tensors of an example model, with other values: every matrix is scaled and its rows change places."""
    values: dict[str, torch.Tensor] = {}
    for file in (MODELS / name).glob("*.safetensors"):
        values |= load_file(file)
    generator = torch.Generator().manual_seed(1)
    for key, tensor in values.items():
        if tensor.dim() == 2 and "embed" not in key and "kv_a" not in key:
            values[key] = (tensor[torch.randperm(tensor.shape[0], generator=generator)] * 0.9).contiguous()
    return values


def directory(name: str, folder: Path, values: dict[str, torch.Tensor], **changes: Any) -> Path:
    folder.mkdir()
    save_file(values, folder / "model.safetensors")
    for file in ("config.json", "generation_config.json", "tokenizer.json"):
        (folder / file).write_bytes((MODELS / name / file).read_bytes())
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | changes))
    return folder


def state(llm: LLM) -> tuple[list[int], list[int]]:
    """Addresses of the parameters, and handles of the plans."""
    plans = llm.model.plans
    return [t.data_ptr() for t in model_tensors(llm.model)], [id(plan) for plan in plans.bound.values()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("quant", [None, "int4_g128"])
def test_the_new_values_are_those_of_a_fresh_model(
    name: str, quant: str | None, make: Callable[..., LLM], tmp_path: Path
) -> None:
    folder = directory(name, tmp_path / "new", tensors(name))
    llm, fresh = make(name, quant=quant, decode_graphs=True), make(folder, quant=quant, decode_graphs=True)
    old, expected = answer(llm), answer(fresh)
    before = state(llm)
    graphs = dict(llm.engine.runner.decode.graphs) if llm.engine.runner.decode else {}
    llm.engine.update_weights(folder)
    assert state(llm) == before
    assert llm.engine.runner.decode is not None and llm.engine.runner.decode.graphs == graphs and graphs
    assert answer(llm) == expected and expected != old
    llm.engine.update_weights(MODELS / name)
    assert answer(llm) == old


def test_from_tensors_and_from_the_cpu(make: Callable[..., LLM], tmp_path: Path) -> None:
    values = tensors(LLAMA)
    llm, fresh = make(LLAMA), make(directory(LLAMA, tmp_path / "new", values))
    llm.engine.update_weights({key: tensor.float() for key, tensor in values.items()}, staging="cpu")
    assert answer(llm) == answer(fresh)
    for tensor in values.values():
        tensor.fill_(float("nan"))  # they are the trainer's own, and not ours
    assert answer(llm) == answer(fresh)


def test_prefixes_of_the_old_weights_are_forgotten(make: Callable[..., LLM], tmp_path: Path) -> None:
    folder = directory(LLAMA, tmp_path / "new", tensors(LLAMA))
    llm, fresh = make(LLAMA), make(folder)
    answer(llm)
    assert len(llm.engine.scheduler.cache or ()) > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine, "reset_prefix_cache", lambda: None)
        llm.engine.update_weights(folder)
    assert answer(llm) != answer(fresh)  # the planted fault: blocks of the old weights are shared
    llm.engine.update_weights(folder)
    assert len(llm.engine.scheduler.cache or ()) == 0
    assert answer(llm) == answer(fresh)
    llm.engine.scheduler.check()


def without(values: dict[str, torch.Tensor]) -> None:
    del values["model.layers.3.mlp.down_proj.weight"]


def reshaped(values: dict[str, torch.Tensor]) -> None:
    values["model.layers.3.self_attn.k_proj.weight"] = torch.zeros(127, 256)


def superfluous(values: dict[str, torch.Tensor]) -> None:
    values["model.layers.9.mlp.down_proj.weight"] = torch.zeros(256, 768)


def integers(values: dict[str, torch.Tensor]) -> None:
    values["model.norm.weight"] = torch.zeros(256, dtype=torch.int32)


@pytest.mark.parametrize(
    "spoil,message",
    [
        (
            without,
            "layers.3.down is left unwritten: .* has no tensor model.layers.3.mlp.down_proj.weight",
        ),
        (reshaped, r"model.layers.3.self_attn.k_proj.weight must have shape \[128, 256\], got \[127, 256\]"),
        (superfluous, "holds tensors that no parameter of the model takes: model.layers.9.mlp.down_proj"),
        (integers, "tensor model.norm.weight must be .*, got torch.int32"),
    ],
)
@pytest.mark.parametrize("stored", [False, True])
def test_a_refused_update_leaves_the_old_weights(
    spoil: Callable[[dict[str, torch.Tensor]], None],
    message: str,
    stored: bool,
    shared: Callable[..., LLM],
    tmp_path: Path,
) -> None:
    llm, values = shared(LLAMA), tensors(LLAMA)
    before = [tensor.clone() for tensor in model_tensors(llm.model)]
    spoil(values)
    if stored:
        message = message.replace("tensor model.norm.weight must be .*, got torch.int32", "model.norm.weight")
    with pytest.raises(CheckpointError, match=message):
        llm.engine.update_weights(directory(LLAMA, tmp_path / "new", values) if stored else values)
    assert all(torch.equal(a, b) for a, b in zip(before, model_tensors(llm.model), strict=True))


def test_another_model_scheme_or_configuration(shared: Callable[..., LLM], tmp_path: Path) -> None:
    llm = shared(LLAMA)
    with pytest.raises(CheckpointError, match="differs from that of the loaded model in architecture, "):
        llm.engine.update_weights(MODELS / DEEPSEEK)
    other = directory(LLAMA, tmp_path / "eps", tensors(LLAMA), rms_norm_eps=1e-6)
    with pytest.raises(CheckpointError, match="differs from that of the loaded model in rms_eps"):
        llm.engine.update_weights(other)
    change = (
        r"model\.layers\[0\]\.attention\.qkv\.weight\.scheme would change: fp32, and in the update int4_g128"
    )
    with pytest.raises(CheckpointError, match=change):
        llm.engine.update_weights(MODELS / LLAMA, quant="int4_g128")
    with pytest.raises(UsageError, match="int5"):
        llm.engine.update_weights(MODELS / LLAMA, quant="int5")


def test_requests_that_have_begun(make: Callable[..., LLM]) -> None:
    engine = make(LLAMA).engine
    engine.add_request("a", PROMPT, PARAMS)
    engine.update_weights(MODELS / LLAMA)  # it waits, and has no keys and values of the old weights
    engine.step()
    with pytest.raises(UsageError, match="update_weights while requests have begun and not ended: pause"):
        engine.update_weights(MODELS / LLAMA)
    engine.abort()
    engine.update_weights(MODELS / LLAMA)


def test_a_copy_that_fails_says_how_far_it_came(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(LLAMA).model
    new = build_like(model, tensors(LLAMA), None, None)
    calls: list[int] = []
    copy = torch.Tensor.copy_

    def failing(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("the device fell off the bus")
        return copy(self, other)

    monkeypatch.setattr(torch.Tensor, "copy_", failing)
    with pytest.raises(
        RuntimeError, match=r"updated up to model\.\S+, 4 of \d+ tensors, .* load the model again"
    ):
        copy_weights(model, new)
