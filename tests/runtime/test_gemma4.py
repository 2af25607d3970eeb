"""What Gemma 4 has of its own: layers that read the cache of others, keys that are values, vectors of tokens for each layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gristmill.kernels.rope.cache import inverse_frequencies
from gristmill.runtime.errors import ConfigError, UsageError
from gristmill.runtime.kv_cache.external import ExternalCache
from gristmill.runtime.kv_cache.size import make_cache
from gristmill.runtime.layers.moe import MixtureOfExperts
from gristmill.runtime.layers.qk_norm import Queries, Values
from gristmill.runtime.llm import LLM
from gristmill.runtime.loader.config import load_config, parse_config
from gristmill.runtime.models.per_layer import Layer, PerLayerDecoder
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.tools.calibration import LayerStream
from gristmill.tools.evaluate import window_logits
from tests.runtime import oracle
from tests.runtime.family_cases import build, prompt
from tests.runtime.poison import poison

E2B, DENSE, BIASES = "gemma-4-e2b", "gemma-4-31b", "gemma-4 with biases and narrow full attention"
EXPERTS = "gemma-4-26b-a4b"
PROMPTS = [prompt(50), [*prompt(50), 5, 6, 7], [*prompt(33), 9], prompt(3, 100), prompt(120)]
PARAMS = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
OPTIONS: dict[str, dict[str, Any]] = {
    "chunks": {"max_chunk": 7, "block_size": 4},
    "preemption": {"rows": 31, "block_size": 4, "max_seqs": 4, "max_batch_tokens": 16},
    "decode graphs": {"decode_graphs": True, "block_size": 4},
    "prompt graphs": {"prompt_graphs": 64, "max_chunk": 9, "block_size": 4},
    "drafts": {"speculate": "ngram:3", "block_size": 4},
    "a store of blocks": {"kv_transfer": "host:1GiB", "block_size": 4, "rows": 50},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {name: tmp_path_factory.mktemp("gemma-4") for name in (E2B, DENSE, BIASES, EXPERTS)}
    for name, path in paths.items():
        build(name, path)
    return paths


@pytest.fixture(scope="module")
def plain(make: Callable[..., LLM], folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    return {name: ids(make(path, decode_graphs=False)) for name, path in folders.items()}


def ids(llm: LLM) -> list[list[int]]:
    return [list(done.token_ids) for done in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", [E2B, DENSE])
def test_ids_are_the_same_however_steps_are_made(
    name: str,
    option: str,
    make: Callable[..., LLM],
    folders: dict[str, Path],
    plain: dict[str, list[list[int]]],
) -> None:
    options = dict(OPTIONS[option])
    if rows := options.pop("rows", None):  # of blocks of every group
        options["num_blocks"] = rows * {E2B: 2, DENSE: 6}[name]
    llm = make(folders[name], **options)
    assert llm.engine.runner.cache.windows[:2] == (0, 24)
    if option != "a store of blocks":  # which copies free blocks
        poison(llm)
    for _ in range(2):
        assert ids(llm) == plain[name]
    llm.engine.scheduler.check()
    cache = llm.engine.runner.cache
    assert not cache.storage[:, :, cache.num_blocks].any(), "the null block was written"


def test_a_cache_of_the_caller(
    make: Callable[..., LLM], folders: dict[str, Path], plain: dict[str, list[list[int]]]
) -> None:
    import gristmill
    from gristmill.runtime.runner import Runner
    from gristmill.runtime.scheduler import SchedulerConfig

    model = make(folders[E2B]).model
    layers = list(make_cache(model, 64, 16).layers)
    runner = Runner(model, ExternalCache(model, layers), decode_graphs=False)
    engine = gristmill.Engine.from_parts(runner, SchedulerConfig(num_blocks=64, block_size=16))
    for index, given in enumerate(PROMPTS):
        engine.add_request(str(index), given, PARAMS)
    found: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            found.setdefault(output.id, []).extend(output.new_ids)
    assert [found[str(index)] for index in range(len(PROMPTS))] == plain[E2B]
    layers[4] = layers[0]
    with pytest.raises(UsageError, match="layer 4 of the cache must have the tensors of layer 1, whose keys"):
        ExternalCache(model, layers)


def wrong_logits(name: str, make: Callable[..., LLM], folders: dict[str, Path], **options: Any) -> float:
    """The largest difference to transformers, of the largest logit."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folders[name], attn_implementation="eager"
    ).eval()
    given = prompt(100)
    expected = oracle.logits(model, given)
    actual = window_logits(make(folders[name], **options).engine, given)
    return float((actual - expected).abs().max() / expected.abs().max())


def test_what_a_layer_leaves_out_shows(
    make_plain: Callable[..., LLM], folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted faults in the layers: each is far over the difference of a right model."""

    def of_keys(self: Values, rows: Tensor) -> Tensor:
        """Values that are not normalized."""
        return torch.cat((rows, rows[:, -self.kv_heads :]), 1) if self.of_keys else rows

    def unrotated(self: Queries, rows: Tensor, positions: Tensor, q: Tensor) -> None:
        self.norm(rows, self.weight, self.eps, q)  # type: ignore[misc]

    def of_another(self: PerLayerDecoder, tokens: Tensor, embedded: Tensor) -> list[tuple[Tensor, ...]]:
        return [*layer_inputs(self, tokens, embedded)][::-1]

    def unscaled(self: Layer, *args: Any) -> Tensor:
        scale, self.scale = self.scale, torch.ones(1)
        try:
            return call(self, *args)
        finally:
            self.scale = scale

    def without_factors(self: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, chosen = route(self, x)
        return scores / self.expert_scale[chosen], chosen  # type: ignore[index]

    def from_another_norm(self: MixtureOfExperts, x: Tensor, routed_by: Tensor) -> Any:
        return mixture(self, x, x)

    route, mixture = MixtureOfExperts.route, MixtureOfExperts.__call__
    layer_inputs, call = PerLayerDecoder.layer_inputs, Layer.__call__
    faults = [
        (DENSE, Values, "__call__", of_keys),
        (E2B, Queries, "__call__", unrotated),
        (E2B, PerLayerDecoder, "layer_inputs", of_another),
        (E2B, Layer, "__call__", unscaled),
        (EXPERTS, MixtureOfExperts, "route", without_factors),
        (EXPERTS, MixtureOfExperts, "__call__", from_another_norm),
    ]
    for name, kind, method, wrong in faults:
        assert wrong_logits(name, make_plain, folders) < 1e-4
        with monkeypatch.context() as patch:
            patch.setattr(kind, method, wrong)
            assert wrong_logits(name, make_plain, folders) > 1e-2, (name, method)


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_token_head"])
def test_readers_have_the_scales_of_what_they_read(
    kv_dtype: str, make: Callable[..., LLM], folders: dict[str, Path], tmp_path: Path
) -> None:
    """Scales of tensors are of the layer that is read, those of tokens in its cache. Planted fault: scales of their own."""
    # With small scores, which rounding does not change much.
    changed(folders[E2B], tmp_path, lambda name: 0.1 if "q_norm" in name else 1.0)
    given = prompt(100)
    exact = window_logits(make(tmp_path).engine, given)
    llm = make(tmp_path, kv_dtype=kv_dtype)
    attentions = [layer.attention for layer in llm.model.layers]  # type: ignore[union-attr]
    for scale in {id(s): s for attention in attentions for s in attention.scales if s is not None}.values():
        scale.fill_(1 / 64)

    def error() -> float:
        difference = window_logits(llm.engine, given) - exact
        return float((difference.square().mean() / exact.square().mean()).sqrt())

    right = error()
    assert right < 0.1
    for attention in attentions[3:]:
        attention.scales = (torch.ones(1, 1, 1), torch.ones(1, 1, 1))
    assert (error() > 2 * right) == (kv_dtype == "fp8")


def changed(folder: Path, into: Path, factor: Callable[[str], float]) -> None:
    """The model of a folder with its tensors multiplied by factors."""
    tensors = {name: value * factor(name) for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    (into / "config.json").write_text((folder / "config.json").read_text())


def read(folder: Path, **changes: Any) -> Any:
    data = json.loads((folder / "config.json").read_text())
    return parse_config({k: v for k, v in {**data, **changes}.items() if v is not ...})


def test_entries_of_earlier_files(folders: dict[str, Path]) -> None:
    """``global_head_dim`` and ``num_global_key_value_heads`` are heads of full attention, as ``per_layer_config`` says them by layer."""
    for name, entries in (
        (E2B, {"global_head_dim": 32}),
        (DENSE, {"global_head_dim": 32, "num_global_key_value_heads": 1}),
    ):
        assert read(folders[name], per_layer_config=..., **entries) == load_config(folders[name])
    plain = read(folders[DENSE], per_layer_config=..., attention_k_eq_v=False, num_global_key_value_heads=1)
    assert {layer.kv_heads for layer in plain.layer_attention} == {4}  # the entry is for keys that are values
    assert [layer.head_dim for layer in plain.layer_attention] == [16] * 5 + [512, 512]
    usual = read(folders[DENSE], layer_types=..., num_hidden_layers=8)
    assert [bool(window) for window in usual.windows] == [True] * 5 + [False, True, False]


def test_frequencies_are_those_of_transformers(folders: dict[str, Path]) -> None:
    import transformers

    for path in folders.values():
        model, read = transformers.AutoModelForCausalLM.from_pretrained(path), load_config(path)
        kinds = model.config.layer_types
        for layer, kind in enumerate(kinds):
            own = inverse_frequencies(read.of_layer(layer).rope_dim, read.rope_of(layer))  # type: ignore[arg-type]
            assert torch.equal(own, getattr(model.model.rotary_emb, f"{kind}_inv_freq")), kind


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not supported"),
        (
            {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3, "moe_intermediate_size": 32},
            "top_k_experts = 3 is more than the 2 experts",
        ),
        ({"enable_moe_block": True, "num_experts": 2}, "'top_k_experts' is missing"),
        ({"hidden_activation": "silu"}, "hidden_activation must be gelu_pytorch_tanh, got 'silu'"),
        ({"num_kv_shared_layers": 5}, "leaves layer 2 no layer before it of full_attention whose keys"),
        ({"num_kv_shared_layers": 6}, "leaves layer 0 no layer before it of sliding_attention whose keys"),
        ({"per_layer_config": {"5": {"head_dim": 64}}}, "layer 5: other heads than layer 2, whose keys"),
        (
            {"per_layer_config": {"1": {"intermediate_size": 9}}},
            "layer 1: only head_dim and num_key_value_heads may differ, got inter",
        ),
        ({"per_layer_config": {"1": {"head_dim": 15}}}, r"layer 1: .* and head_dim \(15\) be even"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        ({"per_layer_config": {"2": {"num_key_value_heads": 3}}}, r"num_key_value_heads \(3\) must divide"),
        ({"vocab_size_per_layer_input": 299}, r"must be at least vocab_size \(300\), got 299"),
        (
            {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}},
            "is for the type proportional, got 0.5",
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}
                }
            },
            "from 0 to 1, got 2",
        ),
        ({"layer_types": ["linear_attention"] * 6}, "one of sliding_attention, full_attention"),
    ],
)
def test_what_is_not_supported_is_refused(
    changes: dict[str, Any], message: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(folders[E2B], **changes)


def test_what_needs_layers_that_are_alike_is_refused(
    make: Callable[..., LLM], folders: dict[str, Path]
) -> None:
    with pytest.raises(
        UsageError, match="Gemma4ForCausalLM has layers that read the keys and values of others"
    ):
        LayerStream(folders[E2B], prompt(300), 64, 2, "cpu")
    with pytest.raises(UsageError, match="such a model cannot pool"):
        make(folders[E2B], task="embed", num_blocks=None)


def test_new_weights(make: Callable[..., LLM], folders: dict[str, Path], tmp_path: Path) -> None:
    """Scales of layers, and what readers share with others, are written too."""
    changed(folders[E2B], tmp_path, lambda name: 1.1)
    llm, given = make(folders[E2B]), prompt(60)
    expected = window_logits(make(tmp_path).engine, given)
    assert not torch.equal(window_logits(llm.engine, given), expected)
    llm.engine.update_weights(tmp_path)
    assert torch.equal(window_logits(llm.engine, given), expected)
