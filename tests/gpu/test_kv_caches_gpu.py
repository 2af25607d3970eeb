"""Blocks from the cache of one process to that of another, on one GPU and on two; replicas on GPUs of their own that share what they have."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from gristmill.runtime.completion import Chunk
from gristmill.runtime.kv_transfer.prefill_decode import PrefillDecode
from gristmill.runtime.llm import LLM
from gristmill.runtime.parallel.loading import environments
from gristmill.runtime.parallel.replicas import Replicas
from gristmill.runtime.sampling_params import SamplingParams
from lab.kv_caches import ORDERS, WAYS, answer, in_process, publish_blocks, read_blocks
from tests.gpu.test_kv_transfer_gpu import config
from tests.runtime.oracle import LLAMA, MODELS

pytestmark = pytest.mark.gpu
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
NAME = f"gpu-{os.getpid()}"
POOL = f"device:{NAME},save_after=1"
PROMPTS = [[(7 * i + seed) % 500 for i in range(130 - 20 * seed)] for seed in range(3)]
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
OPTIONS = {"device": "cuda", "dtype": "fp32", "num_blocks": 128, "max_seqs": 4, "warm": "off"}


@pytest.fixture(autouse=True)
def folder() -> Iterator[None]:
    yield
    shutil.rmtree(Path("/dev/shm") / f"gristmill-{NAME}", ignore_errors=True)


@pytest.mark.parametrize("second", [0, pytest.param(1, marks=needs_two)])
def test_blocks_of_another_process(second: int) -> None:
    """They have the digests that the owner has computed, in any order, every time. Each process sees one GPU."""
    device = torch.device("cuda")
    given = {"config": config(), "count": 300, "name": NAME, "device": device}
    see = environments(second + 1, 0, {"device": "cuda"})
    with in_process(see[0], partial(publish_blocks, **given)) as owner:
        answer(owner)
        with in_process(see[second], partial(read_blocks, **given, rounds=3)) as reader:
            _, samples = answer(reader)
    assert len(samples) == len(ORDERS) * len(WAYS) and {len(measured) for measured in samples.values()} == {3}


async def collected(stream: object) -> tuple[int, ...]:
    ids: list[int] = []
    async for chunk in stream:  # type: ignore[attr-defined]
        assert isinstance(chunk, Chunk)
        ids += chunk.token_ids
    return tuple(ids)


@needs_two
def test_prefill_on_one_gpu_and_decode_on_another() -> None:
    expected = [done.token_ids for done in LLM(MODELS / LLAMA, **OPTIONS).generate(PROMPTS, PARAMS)]

    async def main() -> None:
        async with PrefillDecode(MODELS / LLAMA, POOL, **OPTIONS) as front:
            for _ in range(2):
                answers = [await collected(front.stream(prompt, PARAMS)) for prompt in PROMPTS]
                assert answers == expected
            [state] = await front.decode.status()
            assert state.kv_transfer.loaded_tokens >= sum((len(p) - 1) // 16 * 16 for p in PROMPTS)
            assert not state.kv_transfer.failures and not front.computed_again

    asyncio.run(asyncio.wait_for(main(), 500))


@needs_two
def test_a_replica_is_started_again_on_its_gpu() -> None:
    expected = LLM(MODELS / LLAMA, **OPTIONS).generate(PROMPTS[:1], PARAMS)[0].token_ids

    def visible(replicas: Replicas) -> list[bytes]:
        pids = [replica.child.process.pid for replica in replicas._replicas]
        texts = [Path(f"/proc/{pid}/environ").read_bytes() for pid in pids]
        return [text.split(b"CUDA_VISIBLE_DEVICES=")[1].split(b"\0")[0] for text in texts]

    async def main() -> None:
        async with Replicas(MODELS / LLAMA, 2, route="round_robin", restarts=3, **OPTIONS) as replicas:
            before = visible(replicas)
            assert len(set(before)) == 2
            for _ in range(4):
                assert (await replicas.generate(PROMPTS[0], PARAMS))[0].token_ids == expected
            assert all(state.cached_blocks for state in await replicas.status())
            first = replicas._replicas[1].child.process.pid
            os.kill(first, signal.SIGKILL)
            while len(replicas._loads()) < 2 or replicas._replicas[1].child.process.pid == first:
                assert (await replicas.generate(PROMPTS[0], PARAMS))[0].token_ids == expected
                await asyncio.sleep(0.1)
            for _ in range(4):
                assert (await replicas.generate(PROMPTS[0], PARAMS))[0].token_ids == expected
            assert visible(replicas) == before
            assert all(state.cached_blocks for state in await replicas.status())

    asyncio.run(asyncio.wait_for(main(), 500))
