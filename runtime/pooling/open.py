"""Opening a model for pooling: what it is for, and the engine and the front that make it so."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from gristmill.kernel_registry.policy import Policy
from gristmill.quant.checkpoints.checkpoint import FLOATS, Checkpoint, NoTokenizerError
from gristmill.runtime.config import Fields, ModelConfig
from gristmill.runtime.devices import notice
from gristmill.runtime.engine_config import EngineConfig
from gristmill.runtime.errors import ConfigError, UsageError, explain_memory
from gristmill.runtime.kv_cache.size import step_limits
from gristmill.runtime.loader.config import open_checkpoint, parse_config
from gristmill.runtime.loader.load import load_encoder
from gristmill.runtime.models import Encoder, families, model_table
from gristmill.runtime.parallel.mesh import ALONE, Mesh
from gristmill.runtime.pooling.classes import read_classes
from gristmill.runtime.pooling.colbert import read_colbert
from gristmill.runtime.pooling.engine import PoolingEngine
from gristmill.runtime.pooling.front import PoolingFront, PoolingShape
from gristmill.runtime.pooling.late_interaction import LateScorer
from gristmill.runtime.pooling.late_texts import LateTexts
from gristmill.runtime.pooling.modules import Modules, Pooling, read_modules
from gristmill.runtime.pooling.pairs import Scorer
from gristmill.runtime.pooling.parallel_engine import ParallelPoolingEngine, start_pooling_ranks
from gristmill.runtime.pooling.pooler import AnswerHead, ClassifierHead, EmbeddingHead, Head, TokenHead
from gristmill.runtime.pooling.scoring import (
    AnswerScorer,
    PairScorer,
    SimilarityScorer,
    pair_activation,
)
from gristmill.runtime.pooling.warm_up import warm_up
from gristmill.runtime.progress import progress_bar
from gristmill.runtime.tokenizer import Tokenizer
from gristmill.runtime.warm_up import WarmUp

UNUSED_OPTIONS = ("speculate", "kv_transfer", "quant_head")
"""Options that pooling has no use for."""


@dataclass(frozen=True)
class PoolingModel:
    """A model that is for pooling, as its files describe it.

    Attributes:
        checkpoint, config: of the model itself, which may be in a folder of the directory.
        task: ``embed`` or ``score``.
        front: what prepares texts for it; it has no engine yet.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    task: str
    front: PoolingFront


def describe_pooling(checkpoint: Checkpoint, options: EngineConfig) -> PoolingModel | None:
    """What a model does that is for pooling, without its weights; None if it generates.

    Raises:
        UsageError, ConfigError, CheckpointError: as of `LLM`.
    """
    modules = (read_modules(checkpoint.path) if checkpoint.path.is_dir() else None) or read_colbert(
        checkpoint
    )
    if modules is not None and modules.model:
        checkpoint = open_checkpoint(checkpoint.path / modules.model)
    data, generation, origin = checkpoint.config()
    config = parse_config(data, generation, origin)
    task: str = options.task
    if task == "auto":
        task = "embed" if modules is not None and config.task == "generate" else config.task
    if task == "generate":
        return None
    _check(checkpoint, config, task, options)
    encodes = families()[config.architecture].encodes or config.bidirectional
    modules = modules or (Modules() if encodes else Modules(Pooling(("last",)), normalize=True))
    answers = task == "score" and not encodes and not config.labels
    front = _front(checkpoint, config, Fields(data, origin), modules, answers, options.max_model_len)
    return PoolingModel(checkpoint, config, task, front)


def _check(checkpoint: Checkpoint, config: ModelConfig, task: str, options: EngineConfig) -> None:
    """UsageError if the model is not for this task, or for an option that pooling has no use for."""
    if task == "embed" and config.labels:
        raise UsageError(
            f"{checkpoint.path} has a classifier, which scores pairs of texts: task='score', or 'auto'"
        )
    for name in UNUSED_OPTIONS:
        if getattr(options, name) is not None:
            raise UsageError(
                f"{name} is for models that generate text, and {checkpoint.path} is one for embeddings or scores"
            )
    if options.context_parallel:
        raise UsageError(
            "context_parallel spreads a KV cache over ranks, and embeddings and scores have none"
        )


def _front(
    checkpoint: Checkpoint,
    config: ModelConfig,
    fields: Fields,
    modules: Modules,
    answers: bool,
    max_model_len: int | None,
) -> PoolingFront:
    """What prepares texts for a model; `fields` are those of its config.json, `answers`: it is asked for "yes" or "no"."""
    try:
        tokenizer: Tokenizer | NoTokenizerError = Tokenizer(checkpoint)
    except NoTokenizerError as error:
        tokenizer = error
    limits = (config.max_position, None if modules.late else modules.max_length, max_model_len)
    longest = min(limit for limit in limits if limit is not None)
    embeds = not config.labels and not answers
    late: LateTexts | None = None
    if embeds and modules.late is not None:
        if isinstance(tokenizer, NoTokenizerError):
            raise tokenizer
        late = LateTexts(modules.late, tokenizer, longest, str(checkpoint.path))
    elif embeds and modules.pooling is None:
        raise ConfigError(f"{checkpoint.path}: modules.json has neither Pooling nor Dense")
    columns = modules.columns(config.hidden_size) if embeds else config.labels or 1
    shape = PoolingShape(longest, config.vocab_size, columns, embeds)
    widths = fields.get("matryoshka_dimensions", list, None) or ()
    scorer = _scorer(config, fields, modules, late, answers)
    classes = read_classes(fields, config.labels) if config.labels > 1 else None
    return PoolingFront(shape, tokenizer, modules, widths, str(checkpoint.path), scorer, late, classes)


def _scorer(
    config: ModelConfig, fields: Fields, modules: Modules, late: LateTexts | None, answers: bool
) -> Scorer | None:
    """How a model scores pairs of texts; None = not at all, as it has several classes."""
    if config.labels:
        return PairScorer(pair_activation(fields.data, fields.origin)) if config.labels == 1 else None
    if answers:
        return AnswerScorer()
    return SimilarityScorer(modules.similarity) if late is None else LateScorer(late)


def open_pooling(checkpoint: Checkpoint, options: EngineConfig) -> PoolingFront | None:
    """The front of a model that is for pooling, with its engine, here or over several ranks; None if it generates. Raises as
    `describe_pooling`; RankError if a rank does not load it."""
    described = describe_pooling(checkpoint, options)
    if described is None:
        return None
    front, begin = described.front, time.perf_counter()
    with progress_bar() as progress:
        warm: Callable[[], WarmUp]
        if options.tensor_parallel > 1:
            ranks = start_pooling_ranks(str(checkpoint.path), described.config, options, progress)
            front.engine = ParallelPoolingEngine(ranks, front.shape.max_length, options)
            warm = partial(ranks.warm_up, progress)
        else:
            front.engine = engine = load_pooling(described, options, partial(progress, "weights"))
            warm = partial(warm_up, engine, progress)
        if options.warm == "off":
            return front
        loaded = {"weights": time.perf_counter() - begin}
        try:
            report = warm()
        except BaseException:
            front.engine.close()
            raise
    notice(f"{described.checkpoint.path}: {replace(report, seconds=loaded | report.seconds)}")
    return front


def load_pooling(
    described: PoolingModel,
    options: EngineConfig,
    progress: Callable[[int, int], None],
    mesh: Mesh = ALONE,
    policy: Policy | None = None,
) -> PoolingEngine:
    """The engine of a model in this process, which may be one of the ranks that share it.

    Args:
        progress: as of `Weights.progress`.
        mesh, policy: the place of a rank, and the policy that all ranks have.
    """
    length = described.front.shape.max_length
    alone = mesh.world == 1
    device = options.device if alone else mesh.device
    with explain_memory(str(described.checkpoint.path), device):
        model = load_encoder(
            described.checkpoint,
            options.dtype,
            options.quant,
            device,
            options.loaded_policy if alone else policy,
            progress,
            length,
            mesh,
        )
    seqs, tokens = step_limits(model.plans.device, options.max_seqs, options.max_batch_tokens)
    return PoolingEngine(
        model,
        _head(model, described),
        max_batch_tokens=tokens,
        max_seqs=tokens if options.max_seqs is None else seqs,
        max_length=length,
        max_queued=options.max_queued,
        max_queued_tokens=options.max_queued_tokens,
    )


def _head(model: Encoder, described: PoolingModel) -> Head:
    """What follows the hidden states of a model."""
    config, front, plans = described.config, described.front, model.plans
    pooling, dense = front.modules.pooling, front.modules.dense
    if config.labels:
        return ClassifierHead(model)
    if front.late is not None:
        return TokenHead(plans, config.hidden_size, dense)
    if front.shape.embeds and pooling is not None:
        return EmbeddingHead(plans, config.hidden_size, pooling, dense)
    return AnswerHead(plans, answer_row(described.checkpoint, config, front.given_tokenizer))


def answer_row(
    checkpoint: Checkpoint, config: ModelConfig, tokenizer: Tokenizer | NoTokenizerError
) -> Tensor:
    """The row of "yes" in the logits head, less that of "no": float32 [hidden].

    Raises:
        ConfigError: there is no logits head, or no such tokens.
    """
    if isinstance(tokenizer, NoTokenizerError):
        raise tokenizer
    ids = [tokenizer.token_id(answer) for answer in ("yes", "no")]
    table = model_table(config).within(families()[config.architecture].base, checkpoint)
    name = next(
        w.sources[0] for w in table.weights if w.target == ("embedding" if config.tie_embeddings else "head")
    )
    if config.task != "generate" or name not in checkpoint or None in ids:
        raise ConfigError(
            f'{checkpoint.path}: task="score" needs a logits head, and the tokens "yes" and "no"'
        )
    rows = checkpoint.read(name, (config.vocab_size, config.hidden_size), dtypes=FLOATS)[ids].float()
    return rows[0] - rows[1]
