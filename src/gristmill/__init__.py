"""gristmill: LLM inference kernels, chosen by measurement and verified on the device at hand.

The names offered here are the public interface; docs/api.md lists them. Each is imported on first access:
importing gristmill itself imports neither torch nor a kernel.

Kernels on torch tensors: ``ops.rms_norm(x, weight, eps)``, and every other operation of `gristmill.ops`.
Which kernel a problem gets, and why: ``explain("linear", "m=16,n=4096,k=4096,w=int4_g128", "h200")``.
A model: ``LLM("examples/models/docs-llama", quant="int4_g128").generate("The index")``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill._lazy import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gristmill import nn as nn
    from gristmill import ops as ops
    from gristmill.autotune.bound import BoundPlan as BoundPlan
    from gristmill.autotune.errors import UnpreparedError as UnpreparedError
    from gristmill.autotune.explanation import Explanation as Explanation
    from gristmill.autotune.explanation import explain as explain
    from gristmill.kernel_registry.policy import Policy as Policy
    from gristmill.kernel_registry.policy import PolicyError as PolicyError
    from gristmill.kernel_registry.problem import AxisError as AxisError
    from gristmill.kernel_registry.problem import Problem as Problem
    from gristmill.kernel_registry.registry import UnknownError as UnknownError
    from gristmill.kernel_registry.scheme import QuantScheme as QuantScheme
    from gristmill.kernel_registry.select import NoKernelError as NoKernelError
    from gristmill.kernel_registry.target import Target as Target
    from gristmill.kernels.linear.weight import LinearWeight as LinearWeight
    from gristmill.nn import quantize_module as quantize_module
    from gristmill.quant.rtn import quantize as quantize
    from gristmill.quant.tensor import QuantTensor as QuantTensor
    from gristmill.runtime.async_engine import AsyncEngine as AsyncEngine
    from gristmill.runtime.completion import Chunk as Chunk
    from gristmill.runtime.completion import Completion as Completion
    from gristmill.runtime.engine import Engine as Engine
    from gristmill.runtime.engine import EngineDraining as EngineDraining
    from gristmill.runtime.engine_config import EngineConfig as EngineConfig
    from gristmill.runtime.engine_thread import EngineDeadError as EngineDeadError
    from gristmill.runtime.errors import CheckpointError as CheckpointError
    from gristmill.runtime.errors import ConfigError as ConfigError
    from gristmill.runtime.errors import ErrorInfo as ErrorInfo
    from gristmill.runtime.errors import RankError as RankError
    from gristmill.runtime.errors import ReplicaError as ReplicaError
    from gristmill.runtime.errors import UsageError as UsageError
    from gristmill.runtime.kv_cache.events import AllBlocksCleared as AllBlocksCleared
    from gristmill.runtime.kv_cache.events import BlockRemoved as BlockRemoved
    from gristmill.runtime.kv_cache.events import BlockStored as BlockStored
    from gristmill.runtime.kv_transfer.config import KVTransfer as KVTransfer
    from gristmill.runtime.kv_transfer.prefill_decode import PrefillDecode as PrefillDecode
    from gristmill.runtime.kv_transfer.statistics import TransferStatus as TransferStatus
    from gristmill.runtime.llm import LLM as LLM
    from gristmill.runtime.metrics import Metrics as Metrics
    from gristmill.runtime.parallel.replicas import Replicas as Replicas
    from gristmill.runtime.pooling.classes import Classification as Classification
    from gristmill.runtime.pooling.front import Embedding as Embedding
    from gristmill.runtime.pooling.scoring import Ranked as Ranked
    from gristmill.runtime.pooling.scoring import Score as Score
    from gristmill.runtime.sampling_params import SamplingParams as SamplingParams
    from gristmill.runtime.scheduler import FinishReason as FinishReason
    from gristmill.runtime.scheduler import QueueFull as QueueFull
    from gristmill.runtime.scheduler import RequestOutput as RequestOutput
    from gristmill.runtime.scheduler import RequestTooLarge as RequestTooLarge
    from gristmill.runtime.scheduler import TokenLogprobs as TokenLogprobs
    from gristmill.runtime.speculation.config import Speculation as Speculation
    from gristmill.runtime.speculation.statistics import SpeculationStatus as SpeculationStatus
    from gristmill.runtime.status import EngineStatus as EngineStatus
    from gristmill.runtime.structured_output import StructuredOutput as StructuredOutput
    from gristmill.tools.evaluate import Evaluation as Evaluation
    from gristmill.tools.evaluate import evaluate as evaluate
    from gristmill.tools.evaluate import read_tokens as read_tokens
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
