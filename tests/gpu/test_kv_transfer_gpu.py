"""Blocks of a cache on a GPU, to the host and back: in the order of the stream, bit for bit; engines with stores give the ids of one without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.engine import Engine
from gristmill.runtime.kv_cache.paged import FORMATS, PagedCache
from gristmill.runtime.kv_cache.size import make_cache
from gristmill.runtime.kv_transfer.blocks import CacheBlocks
from gristmill.runtime.kv_transfer.config import KVTransfer
from gristmill.runtime.kv_transfer.records import HEADER
from gristmill.runtime.kv_transfer.transfer import EVICTED, NO_ROOM
from gristmill.runtime.loader.config import parse_config
from gristmill.runtime.models import Model
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import SchedulerConfig
from gristmill.tools.random_model import random_model

pytestmark = pytest.mark.gpu
# The rows of these kernels do not depend on the batch, which differs where blocks are loaded.
TRITON = Policy(pins={"*": ("*_triton",)}, strict=True, origin="strict Triton")
PROMPTS = [[(7 * i + seed) % 500 for i in range(130 - 20 * seed)] for seed in range(5)]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


def config() -> ModelConfig:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "dtype": "float32",
        "tie_word_embeddings": True,
    }
    return parse_config(fields, {}, "the test's config")


@pytest.mark.parametrize("form", ["auto", "fp8_token_head"])
def test_rows_are_blocks_in_the_order_of_the_stream(form: str) -> None:
    device = torch.device("cuda")
    cache = PagedCache(config(), 40, 16, torch.bfloat16, device, FORMATS[form])
    blocks, ids = CacheBlocks(cache, device), [3, 39, 0, 17]
    tensors = [cache.storage.view(torch.uint8)] + ([] if cache.scales is None else [cache.scales])
    rows = blocks.rows(len(ids))
    assert rows.is_pinned() and rows.shape == (4, HEADER + blocks.nbytes)
    torch.cuda._sleep(200_000_000)  # what follows is launched while the GPU is busy
    for tensor in tensors:
        tensor.random_(1, 127)
    event = blocks.read(ids, rows)
    for tensor in tensors:
        expected = tensor.clone()
        tensor.zero_()  # behind the copy
    assert event is not None
    event.synchronize()
    again = blocks.rows(len(ids))
    again.copy_(rows)
    blocks.write([1, 2, 30, 31], again)
    last = tensors[-1]
    torch.cuda.synchronize()
    assert torch.equal(last[:, :, [1, 2, 30, 31]], expected[:, :, ids])
    untouched = [block for block in range(40) if block not in (1, 2, 30, 31)]
    assert not last[:, :, untouched].any() and last[:, :, 1].any()


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(config(), "float32", device="cuda", policy=TRITON)


def answers(
    model: Model, transfer: KVTransfer | None, blocks: int, rounds: int, async_steps: bool
) -> tuple[Engine, list[list[list[int]]]]:
    """Returns the ids of the prompts, computed `rounds` times, each time from an empty prefix cache."""
    runner = Runner(model, make_cache(model, blocks, 16), max_seqs=5)
    scheduling = SchedulerConfig(num_blocks=blocks, block_size=16, max_seqs=5, max_batch_tokens=64)
    engine = Engine.from_parts(runner, scheduling, kv_transfer=transfer, async_steps=async_steps)
    found = []
    for _ in range(rounds):
        ids: dict[str, list[int]] = {str(index): [] for index in range(len(PROMPTS))}
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(str(index), prompt, PARAMS)
        while engine.has_unfinished():
            for output in engine.step():
                ids[output.id] += output.new_ids
            engine.scheduler.check()
        assert engine.flush_kv_transfer(20)
        engine.reset_prefix_cache()
        found.append(list(ids.values()))
    return engine, found


@pytest.mark.parametrize("blocks", [100, 22])
@pytest.mark.parametrize("store", ["host:1GiB", "file:{}"])
@pytest.mark.parametrize("async_steps", [True, False])
def test_same_ids_with_a_store(
    store: str, blocks: int, async_steps: bool, model: Model, tmp_path: Path
) -> None:
    """With room for all requests, and with preemptions; steps in flight, decode graphs."""
    _, expected = answers(model, None, 100, 1, async_steps)
    transfer = KVTransfer([store.format(tmp_path)], save_after=1, identity="random")
    engine, found = answers(model, transfer, blocks, 3, async_steps)
    assert found == expected * 3
    status = engine.status().kv_transfer
    assert status is not None and status.loaded_tokens >= sum(len(prompt) // 16 * 16 for prompt in PROMPTS)
    assert set(status.failures) <= {NO_ROOM, EVICTED}
