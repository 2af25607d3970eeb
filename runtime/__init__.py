"""Scheduler, paged KV cache, layers, models, sampler and engine. Names are imported on first access."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill._lazy import lazy_names

if TYPE_CHECKING:
    from gristmill.quant.checkpoints.shards import ShardSpec as ShardSpec
    from gristmill.quant.checkpoints.table import Weight as Weight
    from gristmill.quant.checkpoints.table import WeightTable as WeightTable
    from gristmill.runtime.async_engine import AsyncEngine as AsyncEngine
    from gristmill.runtime.completion import Chunk as Chunk
    from gristmill.runtime.completion import Completion as Completion
    from gristmill.runtime.config import Fields as Fields
    from gristmill.runtime.config import ModelConfig as ModelConfig
    from gristmill.runtime.engine import Engine as Engine
    from gristmill.runtime.engine import EngineDraining as EngineDraining
    from gristmill.runtime.engine_config import EngineConfig as EngineConfig
    from gristmill.runtime.engine_thread import EngineDeadError as EngineDeadError
    from gristmill.runtime.errors import CheckpointError as CheckpointError
    from gristmill.runtime.errors import ConfigError as ConfigError
    from gristmill.runtime.errors import RankError as RankError
    from gristmill.runtime.errors import ReplicaError as ReplicaError
    from gristmill.runtime.errors import UsageError as UsageError
    from gristmill.runtime.explain import summarize as summarize
    from gristmill.runtime.kv_cache.external import ExternalCache as ExternalCache
    from gristmill.runtime.kv_transfer.config import KVTransfer as KVTransfer
    from gristmill.runtime.kv_transfer.prefill_decode import PrefillDecode as PrefillDecode
    from gristmill.runtime.llm import LLM as LLM
    from gristmill.runtime.loader.load import load_model as load_model
    from gristmill.runtime.metrics import Metrics as Metrics
    from gristmill.runtime.models import Family as Family
    from gristmill.runtime.models.llama import Llama as Llama
    from gristmill.runtime.models.llama import decoder_table as decoder_table
    from gristmill.runtime.parallel.replicas import Replicas as Replicas
    from gristmill.runtime.runner import Runner as Runner
    from gristmill.runtime.sampling_params import SamplingParams as SamplingParams
    from gristmill.runtime.scheduler import FinishReason as FinishReason
    from gristmill.runtime.scheduler import QueueFull as QueueFull
    from gristmill.runtime.scheduler import RequestOutput as RequestOutput
    from gristmill.runtime.scheduler import RequestTooLarge as RequestTooLarge
    from gristmill.runtime.scheduler import SchedulerConfig as SchedulerConfig
    from gristmill.runtime.scheduler import TokenLogprobs as TokenLogprobs
    from gristmill.runtime.speculation import DraftContext as DraftContext
    from gristmill.runtime.speculation import DraftRequest as DraftRequest
    from gristmill.runtime.speculation import ProposerSpec as ProposerSpec
    from gristmill.runtime.speculation.config import Speculation as Speculation
    from gristmill.runtime.structured_output import StructuredOutput as StructuredOutput
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
