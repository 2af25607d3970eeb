"""SGLang's own Llama in SGLang's own model runner, with our attention over its pools and our linear layers: the ids of SGLang's kernels."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sglang.benchmark import one_batch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

import gristmill
from gristmill.integrations.sglang import GristmillAttention, explain
from gristmill.integrations.sglang.linear import GristmillLinearMethod
from gristmill.runtime.errors import UsageError
from tests.integrations.sglang.conftest import MODELS

AT_LOAD = '{"quantization_config": {"quant_method": "gristmill", "quantize_at_load": "int4_g128"}}'
STEPS = 16


@pytest.fixture(scope="module")
def runner(environment: None) -> Iterator[Any]:
    """SGLang's runner of docs-llama, as its own benchmark of one batch makes it."""
    load_plugins()
    arguments = ServerArgs(
        model_path=str(MODELS / "docs-llama"),
        device="cpu",
        dtype="float32",
        attention_backend="gristmill",
        quantization="gristmill",
        json_model_override_args=AT_LOAD,
        page_size=16,
        max_total_tokens=4096,
        max_running_requests=8,
        mem_fraction_static=0.3,
        sampling_backend="pytorch",
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
    )
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_batch, "get_tokenizer", lambda *_, **__: None)
        patch.setattr(torch, "set_num_threads", lambda count: None)
        yield one_batch.load_model(arguments, PortArgs.init_new(arguments), 0, 0)[0]


def texts() -> list[list[int]]:
    tokens = np.fromfile(MODELS / "eval_tokens.u16", dtype=np.uint16)
    return [
        tokens[1000 * i : 1000 * i + length].tolist() for i, length in enumerate([1, 7, 16, 33, 128, 257])
    ]


def generated(runner: Any, ids: Sequence[list[int]]) -> list[list[int]]:
    """The ids that SGLang answers to all prompts in one batch."""
    runner.clear()
    requests = []
    for index, one in enumerate(ids):
        request = Req(
            rid=str(index),
            origin_input_text="",
            origin_input_ids=array("q", one),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=STEPS),
        )
        request.full_untruncated_fill_ids = request.origin_input_ids
        request.logprob_start_len = -1
        request.extend_end = len(one)
        requests.append(request)
    token, _, batch = runner.extend(requests)
    steps = [token.tolist()]
    for _ in range(STEPS - 1):
        token, _ = runner.decode(token, batch)
        steps.append(token.tolist())
    return [list(column) for column in zip(*steps, strict=True)]


def test_the_ids_are_those_of_sglangs_attention_and_of_the_runtime(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, ids = runner.torch_runner, texts()
    assert isinstance(inner.attn_backend, GristmillAttention)
    ours = generated(runner, ids)

    with monkeypatch.context() as patch:
        patch.setattr(inner, "attn_backend", TorchNativeAttnBackend(inner))
        assert generated(runner, ids) == ours

    llm = gristmill.LLM(MODELS / "docs-llama", dtype="float32", num_blocks=256, quant="int4_g128")
    wish = gristmill.SamplingParams(max_tokens=STEPS, ignore_eos=True)
    assert [list(done.token_ids) for done in llm.generate(ids, wish)] == ours

    pages = GristmillAttention._pages
    with monkeypatch.context() as patch:
        patch.setattr(GristmillAttention, "_pages", lambda self, layer: pages(self, (layer + 1) % 2))
        assert generated(runner, ids) != ours

    apply = GristmillLinearMethod.apply

    def planted(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        return apply(self, layer, x, bias) * (1.5 if "layers.3.mlp.down" in self.prefix else 1)

    monkeypatch.setattr(GristmillLinearMethod, "apply", planted)
    assert generated(runner, ids) != ours


def test_the_report_names_every_layer(runner: Any) -> None:
    rows = explain()
    assert len(rows) == 4 * 6 and all(row["taken"] for row in rows)
    assert {(row["scheme"], row["kernels"]) for row in rows} == {("int4_g128", "linear_cpu")}


def test_speculative_steps_are_refused_by_name(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = runner.torch_runner.attn_backend
    init = GristmillAttention.init_forward_metadata

    def verifying(self: Any, batch: Any) -> None:
        monkeypatch.setattr(type(batch.forward_mode), "is_target_verify", lambda mode: True)
        init(self, batch)

    monkeypatch.setattr(GristmillAttention, "init_forward_metadata", verifying)
    with pytest.raises(UsageError, match="does not serve speculative decoding: leave out --speculative-alg"):
        generated(runner, texts()[:1])
    with pytest.raises(UsageError, match="start SGLang with --disable-cuda-graph"):
        backend.init_cuda_graph_state(8, 8)


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("is_cross_attention", True, "cross attention"),
        ("logit_cap", 30.0, "a soft cap of the logits"),
        ("v_head_dim", 128, "values of another width than keys"),
    ],
)
def test_a_layer_that_is_not_served_is_refused_by_name(
    runner: Any, field: str, value: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = runner.torch_runner
    monkeypatch.setattr(inner.model.model.layers[1].self_attn.attn, field, value)
    with pytest.raises(UsageError, match=rf"gristmill does not serve {name} \(layer 1\)"):
        GristmillAttention(inner)


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("kv_cache_layout", "hnd", "the cache layout hnd"),
        ("dtype", torch.bfloat16, "a cache of torch.bfloat16 for a model in torch.float32"),
    ],
)
def test_a_pool_that_is_not_served_is_refused_by_name(
    runner: Any, field: str, value: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = runner.torch_runner
    monkeypatch.setattr(inner.token_to_kv_pool, field, value)
    with pytest.raises(UsageError, match=f"gristmill does not serve {name}"):
        GristmillAttention(inner)
    monkeypatch.setattr(inner, "token_to_kv_pool", object())
    with pytest.raises(UsageError, match=r"a pool of object \(latent attention"):
        GristmillAttention(inner)
