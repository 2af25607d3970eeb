"""Loading a model from disk to a device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from gristmill.autotune.device import free_bytes
from gristmill.kernel_registry.dtypes import canonical_dtype
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.common import FLOATS, torch_dtype
from gristmill.quant import memory
from gristmill.quant.checkpoints.checkpoint import Checkpoint
from gristmill.quant.checkpoints.weights import Weights
from gristmill.quant.formats import open_format
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.devices import notice, parse_device
from gristmill.runtime.errors import UsageError
from gristmill.runtime.explain import warn_of_slow_layers
from gristmill.runtime.kv_cache.paged import parse_cache_format
from gristmill.runtime.layers.plans import BLOCK_SIZE, Plans
from gristmill.runtime.loader.config import open_checkpoint, parse_config
from gristmill.runtime.models import Encoder, Model, build_encoder, build_model, families, model_table
from gristmill.runtime.parallel.mesh import ALONE, Mesh, least, local_config

WEIGHTS_SHARE = 0.75
"""The fraction of a GPU's free memory up to which weights may grow as they are loaded; the rest is for the cache."""


def load_model(
    path: str | Path | Checkpoint,
    dtype: str | torch.dtype = "auto",
    quant: str | QuantScheme | torch.dtype | None = None,
    device: str | torch.device = "auto",
    policy: Policy | None = None,
    block_size: int = BLOCK_SIZE,
    kv_dtype: str | torch.dtype = "auto",
    quant_head: str | QuantScheme | None = None,
    mesh: Mesh = ALONE,
    begin: Callable[[Plans, ModelConfig, Weights], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    max_model_len: int | None = None,
) -> Model:
    """Load a model from a Hugging Face directory or a GGUF file, quantized or not, of the families in `gristmill.runtime.models`.

    A warning says where the KV cache in ``fp8`` finds no scales in the checkpoint.

    Args:
        path: the path of the model, or the model as `open_checkpoint` returned it, whose headers are then not read again.
        dtype: the dtype of activations, cache and unquantized weights; ``auto`` = the checkpoint's.
        quant: a scheme such as ``int4_g128``: linear and expert weights are rounded to it as they are read; embedding, logits head, norms and
            router are kept. For a quantized checkpoint it can name the stored scheme, with an activation format to multiply with
            (``fp8_block.fp8_g128``), or a float dtype (``bf16``), to which all weights are then dequantized.
        kv_dtype, quant_head: as in `Engine`.
        mesh: the place of a rank, which keeps its range of every weight.
        begin: called before the first weight is read.
        progress: as `Weights.progress`.
        max_model_len: tokens of the longest sequence, as of `ModelConfig.for_length`: tables of positions are no longer. A notice
            says where a model has other frequencies for longer ones.

    Raises:
        ConfigError, CheckpointError: an invalid checkpoint.
        UsageError: an unknown dtype, scheme or device.
    """
    checkpoint = open_checkpoint(path)
    config = parse_config(*checkpoint.config()).for_length(max_model_len)
    config = replace(config, replicate_kv=mesh.context_parallel)
    if config.task != "generate":
        raise UsageError(
            f"{checkpoint.path} generates no text: it is for {'scores' if config.labels else 'embeddings'}, by LLM.score or LLM.embed"
        )
    scheme = parse_scheme(quant)
    stored = None if config.quantization is None else open_format(config.quantization)
    form = parse_cache_format(kv_dtype)
    plans = Plans(parse_device(device, policy), parse_dtype(dtype, config), policy, block_size, form, mesh)
    head_scheme = parse_head_scheme(quant_head, config)
    own_config, table = local_config(config, mesh), model_table(config)
    if mesh.world > 1 and not any(weight.shard for weight in table.weights):
        raise UsageError(
            f"tensor_parallel={mesh.world}: the family of {config.architecture} does not declare how its weights are sharded"
        )
    weights = Weights(
        checkpoint, table, plans.dtype, plans.device, scheme, stored, head_scheme, mesh.rank, mesh.world
    )
    weights.progress = progress
    plans.schemes.room = room_of_weights(checkpoint, plans.device, mesh)
    if begin is not None:
        begin(plans, own_config, weights)
    with memory.shared_blocks():
        model = build_model(own_config, weights, plans)
    if weights.without_cache_scales:
        warnings.warn(
            f"{checkpoint.path}: kv_dtype {form.name!r}, and the checkpoint has no scales of the KV cache for "
            f"{len(weights.without_cache_scales)} of {config.num_layers} layers: 1.0 is used there; "
            "kv_dtype 'fp8_token_head' makes its own",
            stacklevel=2,
        )
    if mesh.rank == 0:
        if config.long_position and max_model_len is None:
            notice(
                f"{checkpoint.path}: up to {config.max_position} tokens; a max_model_len above that, up to {config.long_position}, takes the "
                "frequencies of long sequences for all sequences (longrope)"
            )
        if line := plans.schemes.line(str(plans.device)):
            notice(f"{checkpoint.path}: {line}")
        warn_of_slow_layers(str(checkpoint.path), plans)
    return model


def load_encoder(
    path: str | Path | Checkpoint,
    dtype: str | torch.dtype = "auto",
    quant: str | QuantScheme | torch.dtype | None = None,
    device: str | torch.device = "auto",
    policy: Policy | None = None,
    progress: Callable[[int, int], None] | None = None,
    max_length: int | None = None,
    mesh: Mesh = ALONE,
) -> Encoder:
    """Load a model for pooling: an encoder, or a decoder without its logits head.

    Arguments and errors are those of `load_model`. `max_length` bounds the positions of a decoder; those of an encoder can be rows of its
    embedding.
    """
    checkpoint = open_checkpoint(path)
    config = replace(parse_config(*checkpoint.config()), whole=True)
    if max_length is not None and not families()[config.architecture].encodes:
        config = replace(config, max_position=min(max_length, config.max_position))
    stored = None if config.quantization is None else open_format(config.quantization)
    plans = Plans(parse_device(device, policy), parse_dtype(dtype, config), policy, mesh=mesh)
    table = model_table(config).within(families()[config.architecture].base, checkpoint)
    scheme, place = parse_scheme(quant), (mesh.rank, mesh.world)
    weights = Weights(checkpoint, table, plans.dtype, plans.device, scheme, stored, None, *place)
    weights.progress = progress
    plans.schemes.room = room_of_weights(checkpoint, plans.device, mesh)
    with memory.shared_blocks():
        model = build_encoder(local_config(config, mesh), weights, plans)
    if mesh.rank == 0:
        if line := plans.schemes.line(str(plans.device)):
            notice(f"{checkpoint.path}: {line}")
        warn_of_slow_layers(str(checkpoint.path), plans)
    return model


def room_of_weights(checkpoint: Checkpoint, device: torch.device, mesh: Mesh) -> int:
    """Bytes by which the weights of a rank may grow beyond those of the checkpoint, such that they take at most `WEIGHTS_SHARE` of the
    memory that is free now: the least of all ranks, which load the same. 0 on a CPU, where weights are loaded as they are stored.
    """
    room = 0
    if device.type != "cpu":
        specs = map(checkpoint.spec, checkpoint)
        stored = sum(math.prod(shape) * dtype.itemsize for dtype, shape in specs) // mesh.world
        room = max(0, int(free_bytes(str(device)) * WEIGHTS_SHARE) - stored)
    return least(room, mesh)


def parse_scheme(name: str | QuantScheme | torch.dtype | None) -> QuantScheme | None:
    """The scheme of a name; UsageError lists the known ones. None and dense names are returned unchanged."""
    if name is None:
        return None
    try:
        return QuantScheme.parse(name)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


def parse_head_scheme(name: str | QuantScheme | None, config: ModelConfig) -> QuantScheme | None:
    """The scheme of embedding and logits head. ``int8`` is int8 in groups of 128, or by row where 128 does not divide the hidden size."""
    if name == "int8":
        name = "int8_ch" if config.hidden_size % 128 else "int8_g128"
    scheme = parse_scheme(name)
    if scheme is not None and (scheme.is_dense or scheme.activation is not None):
        raise UsageError(f"quant_head must be int8 or a weight-only scheme such as int8_ch, got {scheme}")
    return scheme


def parse_dtype(dtype: str | torch.dtype, config: ModelConfig) -> torch.dtype:
    """The torch dtype of a name; ``auto`` is the checkpoint's. UsageError if it is not a dtype of activations."""
    try:
        name = canonical_dtype(config.dtype if dtype == "auto" else dtype)
    except (TypeError, ValueError):
        name = ""
    if name not in FLOATS:
        raise UsageError(
            f"unknown dtype {dtype!r}; known: auto, {', '.join(FLOATS)} (or float32, float16, bfloat16, half, a torch.dtype)"
        )
    found: torch.dtype = torch_dtype(name)
    return found
