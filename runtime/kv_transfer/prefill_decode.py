"""Prompts computed by some processes, outputs by others; blocks go from one to the other through a store that both have.

async with PrefillDecode("DIR", "shm:pool:8GiB", device="cuda") as front:
    async for chunk in front.stream("The index", SamplingParams(max_tokens=32)):
        print(chunk.text, end="")

The decoding side pulls: it is asked when the blocks are in the store, and looks them up like those of any prompt. What it does not find, because
the other side has died, is late, or has left something damaged, it computes.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from gristmill.runtime.completion import Chunk
from gristmill.runtime.errors import ReplicaError, UsageError
from gristmill.runtime.kv_transfer.config import KVTransfer
from gristmill.runtime.llm import Prompt
from gristmill.runtime.parallel.replicas import Replicas, device_of
from gristmill.runtime.sampling_params import SamplingParams

LOG = logging.getLogger("gristmill")


class PrefillDecode:
    """Replicas that compute prompts and replicas that compute outputs, with one front end.

    Args:
        model, timeout, options: as of `Replicas`, for both kinds.
        store: a `KVTransfer` or its text, with a store that processes share: ``file:FOLDER`` or ``shm:NAME:SIZE``.
        prefill, decode: number of replicas of each kind. On GPUs, those that compute prompts have the first ones.

    Attributes:
        computed_again: requests whose prompt was computed by the second kind alone, because no replica of the first one was left.

    Raises:
        UsageError: as `Replicas`; a store that only one process sees. ReplicaError: as `Replicas`.
    """

    def __init__(
        self,
        model: str | Path,
        store: KVTransfer | str,
        *,
        prefill: int = 1,
        decode: int = 1,
        timeout: float = 60.0,
        **options: Any,
    ) -> None:
        config = KVTransfer.parse(store)
        if all(name.partition(":")[0] == "host" for name in config.stores):
            raise UsageError(
                f"prefill and decode are several processes, and {'+'.join(config.stores)} is memory of one: take file:FOLDER or shm:NAME:SIZE"
            )
        self.computed_again = 0
        self._timeout = timeout
        options["device"] = device_of(options)
        first = replace(config, save_after=1)
        self.prefill = Replicas(model, prefill, timeout=timeout, kv_transfer=first, **options)
        try:
            taken = prefill * options.get("tensor_parallel", 1)
            self.decode = Replicas(model, decode, timeout=timeout, skip=taken, kv_transfer=config, **options)
        except BaseException:
            self.prefill.close()
            raise

    async def __aenter__(self) -> PrefillDecode:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncGenerator[Chunk, None]:
        """As `Replicas.stream`."""
        try:
            await self.prefill.save(prompt, self._timeout)
        except ReplicaError as error:
            if not self.computed_again:
                LOG.warning("prompts are computed by the replicas that compute outputs: %s", error)
            self.computed_again += 1
        async with aclosing(self.decode.stream(prompt, params, priority=priority)) as stream:
            async for chunk in stream:
                yield chunk

    def close(self) -> None:
        """End all processes."""
        self.prefill.close()
        self.decode.close()
