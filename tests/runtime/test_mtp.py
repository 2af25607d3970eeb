"""Drafts of a checkpoint's multi-token-prediction layer are those of its definition, and change no id."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gristmill.runtime.errors import CheckpointError, UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.speculation import hidden_drafts, mtp
from gristmill.runtime.speculation import speculator as speculator_module
from gristmill.runtime.speculation.config import Speculation
from gristmill.runtime.speculation.hidden_drafts import HiddenStateProposer
from gristmill.runtime.speculation.statistics import StepGains
from tests.runtime import oracle
from tests.runtime.draft_sources import use
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS
from tests.runtime.proofs import proves
from tests.runtime.test_speculation import PARAMS, PROMPTS, STATES, content

LAYER = "model.layers.4"
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


def normed(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """docs-deepseek with a prediction layer: a random decoder layer behind a projection that was fitted to the text, so that some of its drafts
    are right."""
    made: Path = tmp_path_factory.mktemp("mtp") / "model"
    shutil.copytree(MODELS / DEEPSEEK, made)
    model, states = oracle.oracle(DEEPSEEK), []
    hook = model.model.norm.register_forward_pre_hook(lambda _, x: states.append(x[0][0].double()))
    windows = [oracle.window(index) for index in range(4)]
    for ids in windows:
        oracle.logits(model, ids)
    hook.remove()
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name, value in {
        k: v for file in MODELS.joinpath(DEEPSEEK).glob("*.safetensors") for k, v in load_file(file).items()
    }.items():
        if name.startswith("model.layers.3."):
            scale = 0.02 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.06
            random = torch.randn(value.shape, generator=generator) * scale
            tensors[name.replace("layers.3", "layers.4")] = (
                random + (value.ndim == 1 and "norm" in name)
            ).to(value.dtype)
    size = model.config.hidden_size
    norms = {name: 1 + 0.3 * torch.randn(size, generator=generator) for name in ("enorm", "hnorm")}
    norms["shared_head.norm"] = model.model.norm.weight.detach() * 1.01
    tensors |= {f"{LAYER}.{name}.weight": weight.bfloat16() for name, weight in norms.items()}
    enorm, hnorm = (tensors[f"{LAYER}.{name}.weight"].double() for name in ("enorm", "hnorm"))
    embedding, last = model.model.embed_tokens.weight.double(), model.model.norm.weight.double()
    rows = [
        torch.cat((normed(embedding[ids[1:]], enorm), normed(normed(state[:-1], last), hnorm)), -1)
        for ids, state in zip(windows, states, strict=True)
    ]
    x, y = torch.cat(rows), torch.cat([state[1:] for state in states])
    fitted = torch.linalg.solve(x.T @ x + 20 * torch.eye(2 * size), x.T @ y).T
    tensors[f"{LAYER}.eh_proj.weight"] = fitted.bfloat16().contiguous()
    tensors[f"{LAYER}.embed_tokens.weight"] = model.model.embed_tokens.weight.detach().bfloat16().clone()
    save_file(tensors, made / "mtp.safetensors", metadata={"format": "pt"})
    index = json.loads((made / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "mtp.safetensors")
    (made / "model.safetensors.index.json").write_text(json.dumps(index))
    return made


class Definition:
    """The layer in float64, over whole sequences: its decoder layer is transformers'."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder, num_hidden_layers=5)
        whole = (
            AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=torch.float32, experts_implementation="eager"
            )
            .eval()
            .double()
        )
        self.block = copy.copy(whole.model)
        self.block._modules = dict(whole.model._modules)
        self.block.layers, self.block.norm = whole.model.layers[4:], torch.nn.Identity()
        self.block.config = copy.copy(config)
        self.block.config.num_hidden_layers = 1
        whole.model.layers, whole.model.config.num_hidden_layers = whole.model.layers[:4], 4
        self.model, self.embedding = whole.model, whole.model.embed_tokens.weight
        self.weights = {
            name.removeprefix(f"{LAYER}."): value.double()
            for name, value in load_file(folder / "mtp.safetensors").items()
        }

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> tuple[list[int], Tensor]:
        """Greedy drafts behind known tokens, and the logits [count, vocab] of each."""
        w, known, drafts, rows = self.weights, list(tokens), list[int](), list[Tensor]()
        states = self.model(torch.tensor([known[:-1]]), use_cache=False).last_hidden_state[0]
        for _ in range(count):
            embedded = normed(self.embedding[known[1:]], w["enorm.weight"])
            joined = torch.cat((embedded, normed(states, w["hnorm.weight"])), -1) @ w["eh_proj.weight"].T
            out = self.block(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0, -1:]
            logits = (normed(out, w["shared_head.norm.weight"]) @ self.embedding.T)[0]
            rows.append(logits)
            drafts.append(int(logits.argmax()))
            known.append(drafts[-1])
            states = torch.cat((states, out))
        return drafts, torch.stack(rows)


@pytest.fixture(scope="module")
def definition(folder: Path) -> Definition:
    return Definition(folder)


def drafted(tokens: int = 3) -> Speculation:
    return Speculation("mtp", tokens, adaptive=False)


def proposer_of(llm: LLM) -> HiddenStateProposer:
    assert llm.engine.speculator is not None
    proposer = llm.engine.speculator.proposer
    assert isinstance(proposer, HiddenStateProposer)
    return use(llm.engine, proposer)


def record(llm: LLM) -> list[tuple[list[int], list[int], Tensor]]:
    """(known tokens, drafts, logits of all drafts) of every request that takes drafts from now on."""
    calls: list[tuple[list[int], list[int], Tensor]] = []
    proposer = proposer_of(llm)
    if (decode := proposer.runner.decode) is not None:
        decode.record = decode.compute  # type: ignore[method-assign]  # what Python sees here a replay does not call
    propose, logits, seen = proposer.propose, proposer._model.logits, list[Tensor]()

    def kept(*arguments: Any) -> Tensor:
        seen.append(logits(*arguments).clone())  # graphs write to the same buffer
        return seen[-1]

    def recorded(requests: Any) -> Any:
        seen.clear()
        drafts = propose(requests)
        if all(len(of_one) == 3 for of_one in drafts):
            known = [list(request.tokens) for request in requests]
            steps = torch.stack([step[: len(known)].double() for step in seen], 1)
            calls.extend(zip(known, drafts, steps.unbind(), strict=True))
        return drafts

    proposer._model.logits, proposer.propose = kept, recorded  # type: ignore[method-assign]
    return calls


def worst(
    calls: Sequence[tuple[list[int], list[int], Tensor]], definition: Definition, count: int = 3
) -> tuple[float, int]:
    """The largest difference of a logit from the definition's, and how many drafts differ from its."""
    differences, wrong = [0.0], 0
    for tokens, drafts, logits in calls[:: max(1, len(calls) // 4)]:
        expected, true = definition.drafts(tokens, count)
        apart = (logits - true).abs().masked_fill(logits == true, 0)  # both may be -inf
        differences.append(float(apart.nan_to_num(torch.inf, torch.inf).max()))
        wrong += sum(a != b for a, b in zip(drafts, expected, strict=True))
    return max(differences), wrong


@proves("drafts", "mtp", "DeepseekV3ForCausalLM")
@pytest.mark.parametrize("state", ["plain", "chunks"])
def test_drafts_are_those_of_the_definition(
    make: Callable[..., LLM], folder: Path, definition: Definition, state: str
) -> None:
    """Of several requests at once, behind accepted and rejected drafts; some of the drafts are accepted."""
    llm = make(folder, speculate=drafted(), **STATES[state])
    calls = record(llm)
    llm.generate(PROMPTS[:4], GREEDY)
    difference, wrong = worst(calls, definition)
    assert difference < 1e-4 and wrong == 0 and len(calls) > 30
    status = llm.engine.status().speculation
    assert status is not None and 0.1 < status.acceptance < 0.9 and status.draft_bytes > 0


def test_faults_show(
    make: Callable[..., LLM], folder: Path, definition: Definition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted faults: norms exchanged, halves exchanged, states, tokens or positions one off, another last norm."""
    cat = torch.cat
    following = speculator_module.following_tokens
    entry = hidden_drafts._entry

    def exchanged(layer: Any) -> None:
        layer.token_norm, layer.hidden_norm = layer.hidden_norm, layer.token_norm

    def halves(layer: Any) -> None:
        monkeypatch.setattr(mtp.torch, "cat", lambda parts, dim=0: cat(parts[::-1], dim))

    def late(layer: Any) -> None:
        layer.states = lambda hidden: hidden.roll(1, 0)

    def head_norm(layer: Any) -> None:
        layer.norm = layer.hidden_norm

    def token(layer: Any) -> None:
        monkeypatch.setattr(
            speculator_module,
            "following_tokens",
            lambda *args: [t + (i == 0) for i, t in enumerate(following(*args))],
        )

    def position(layer: Any) -> None:
        monkeypatch.setattr(
            hidden_drafts, "_entry", lambda name, start, *rest: entry(name, start + (rest[-1] is True), *rest)
        )

    for fault in (None, exchanged, halves, late, head_norm, token, position):
        with monkeypatch.context():
            llm = make(folder, speculate=drafted())
            calls = record(llm)
            if fault is not None:
                fault(proposer_of(llm)._model)
            llm.generate(PROMPTS[:1], SamplingParams(max_tokens=8, ignore_eos=True))
            difference, wrong = worst(calls, definition)
            monkeypatch.undo()
        assert (difference > 1e-3) == (fault is not None), fault


@pytest.mark.parametrize(
    "state",
    [
        "plain",
        "preemption",
        *(pytest.param(s, marks=pytest.mark.slow) for s in ("chunks", "no prefix cache")),
    ],
)
def test_same_ids(make: Callable[..., LLM], shared: Callable[..., LLM], folder: Path, state: str) -> None:
    llm = make(folder, speculate=drafted(), **STATES[state])
    proposer = proposer_of(llm)
    assert content(llm.generate(PROMPTS, PARAMS)) == content(shared(DEEPSEEK).generate(PROMPTS, PARAMS))
    status = llm.engine.status().speculation
    assert status is not None and status.accepted_tokens > 10
    assert not proposer._requests and len(proposer._free) == llm.engine.runner.max_seqs


def test_decode_graphs_hand_over_the_same_states(
    make: Callable[..., LLM], folder: Path, definition: Definition
) -> None:
    """Steps of a graph are padded to the most drafts per sequence."""
    llm = make(folder, speculate=drafted(), decode_graphs=True)
    calls = record(llm)
    llm.generate(PROMPTS[:3], GREEDY)
    runner = llm.engine.runner
    assert runner.decode is not None and sum(graph.steps for graph in runner.decode.graphs.values()) > 5  # type: ignore[union-attr]
    difference, wrong = worst(calls, definition)
    assert difference < 1e-4 and wrong == 0


@pytest.mark.parametrize(("graphs", "fault"), [(False, False), (True, False), (True, True)])
def test_states_of_steps_that_ran_ahead(
    make: Callable[..., LLM],
    folder: Path,
    definition: Definition,
    monkeypatch: pytest.MonkeyPatch,
    graphs: bool,
    fault: bool,
) -> None:
    """Drafting rests again and again; the layer reads the states of the steps that run ahead meanwhile.

    Planted fault: it reads those of the step that was launched last.
    """
    llm = make(folder, speculate=Speculation("mtp", 3), async_steps=True, decode_graphs=graphs)
    runner, scheduler = llm.engine.runner, llm.engine.scheduler
    launch, collect, ahead = runner.launch, runner.collect, list[int]()

    def counted(entries: Any, *others: Any) -> Any:
        ahead.append(sum(entry.tokens is None for entry in entries))
        return launch(entries, *others)

    def of_the_last(step: Any) -> Any:
        result = collect(step)
        runner.hidden = runner._left
        return result

    def refusal(self: StepGains, seqs: int) -> str:
        request = scheduler.running[0]
        return "rests" if (len(request.tokens) + request.pending) % 12 < 6 else ""

    monkeypatch.setattr(runner, "launch", counted)
    if fault:
        monkeypatch.setattr(runner, "collect", of_the_last)
    monkeypatch.setattr(StepGains, "refusal", refusal)
    calls = record(llm)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    [result] = llm.generate(PROMPTS[:1], params)
    difference, wrong = worst(calls, definition)
    assert (difference < 1e-4 and wrong == 0) != fault
    assert sum(ahead) > 8 and len(calls) > 3
    monkeypatch.undo()
    assert make(folder).generate(PROMPTS[:1], params) == [result]


def test_cached_prefixes_serve_the_layer(make: Callable[..., LLM], folder: Path) -> None:
    """The second request's prompt is in the cache, for the layer too: it drafts as well as the first did."""
    prompt = PROMPTS[-1]
    accepted = []
    llm = make(folder, speculate=drafted())
    for _ in range(2):
        before = llm.engine.status().speculation
        assert before is not None
        llm.generate([prompt], GREEDY)
        after = llm.engine.status().speculation
        assert after is not None
        accepted.append(after.accepted_tokens - before.accepted_tokens)
    assert accepted[0] > 4 and abs(accepted[1] - accepted[0]) <= 2


def test_sleep_and_new_weights(make: Callable[..., LLM], folder: Path, definition: Definition) -> None:
    llm = make(folder, speculate=drafted())
    before = content(llm.generate(PROMPTS[:2], GREEDY))
    llm.engine.sleep()
    assert proposer_of(llm).runner.cache.nbytes == 0
    llm.engine.wake_up()
    llm.engine.update_weights(folder)
    calls = record(llm)
    assert content(llm.generate(PROMPTS[:2], GREEDY)) == before
    difference, wrong = worst(calls, definition)
    assert difference < 1e-4 and wrong == 0


def test_both_caches_are_within_the_memory(make: Callable[..., LLM], folder: Path) -> None:
    memory = 8 << 20
    llm = make(folder, num_blocks=None, memory=memory, max_seqs=9, speculate=drafted(4))
    caches = [llm.engine.runner.cache, proposer_of(llm).runner.cache]
    assert 0.95 * memory < sum(cache.nbytes for cache in caches) <= memory
    assert caches[1].num_blocks == caches[0].num_blocks + 9


def test_new_weights_after_a_deep_sleep(make: Callable[..., LLM], folder: Path) -> None:
    """Embedding and head, which the layer shares, are discarded with the model's, and come with its update."""
    llm = make(folder, speculate=drafted())
    before = content(llm.generate(PROMPTS[:2], GREEDY))
    counts = llm.engine.status().speculation
    llm.engine.sleep(level=2)
    llm.engine.wake_up()
    llm.engine.update_weights(folder)
    assert content(llm.generate(PROMPTS[:2], GREEDY)) == before
    again = llm.engine.status().speculation
    assert (
        counts is not None and again is not None and again.accepted_tokens == 2 * counts.accepted_tokens > 0
    )


def test_quantized_with_the_model(make: Callable[..., LLM], folder: Path) -> None:
    plain, quantized = (make(folder, speculate=drafted(1), quant=quant) for quant in (None, "int8_g128"))
    statuses = [llm.engine.status().speculation for llm in (plain, quantized)]
    assert all(status is not None for status in statuses)
    weights = [proposer_of(llm).runner.model.plans.weight_bytes for llm in (plain, quantized)]
    assert weights[1] < 0.5 * weights[0]


def test_warm_up_covers_the_layer(make: Callable[..., LLM], folder: Path) -> None:
    llm = make(folder, speculate=drafted(2), max_seqs=2, max_batch_tokens=32, max_model_len=64)
    report = llm.engine.warm_up()
    assert any(stage.startswith("draft model: ") for stage in report.seconds)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        llm.generate(PROMPTS[:2], SamplingParams(max_tokens=12))


def test_mistakes(make: Callable[..., LLM], folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"saved without: .* has no tensor model\.layers\.4\.enorm\.weight"
    ):
        make(DEEPSEEK, speculate="mtp")
    with pytest.raises(UsageError, match="LlamaForCausalLM with num_nextn_predict_layers = 0"):
        make(LLAMA, speculate="mtp:2")
    with pytest.raises(UsageError, match="takes no model"):
        Speculation("mtp", model="folder")
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tensors = load_file(other / "mtp.safetensors")
    tensors[f"{LAYER}.embed_tokens.weight"] += 1
    save_file(tensors, other / "mtp.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"ties model\.layers\.4\.embed_tokens\.weight"):
        make(other, speculate="mtp")
