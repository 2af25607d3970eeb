"""Models by family. Each file follows its paper and declares one `FAMILY`. No other file names a family.

Families are found by walking this package. Installed packages add families under the entry point group ``gristmill.models``;
each entry names a module with the same attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from gristmill.kernel_registry.declarations import Declarations, find_declarations
from gristmill.kernel_registry.plugins import PluginFailure
from gristmill.quant.checkpoints.native import NativeLayout
from gristmill.quant.checkpoints.table import WeightTable
from gristmill.quant.checkpoints.text_part import TextPart
from gristmill.quant.checkpoints.weights import Weights
from gristmill.quant.formats.gguf import GgufArchitecture
from gristmill.runtime.batch import Batch
from gristmill.runtime.config import Fields, ModelConfig
from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.rope import Rope
from gristmill.runtime.sequences import Sequences

ENTRY_POINTS = "gristmill.models"


class Model(Protocol):
    """The interface of models for the runner. `make_layer` makes one decoder layer from (config, weights, plans, index, rope)."""

    config: ModelConfig
    plans: Plans
    make_layer: ClassVar[Callable[..., Any]]

    def forward(self, batch: Batch, cache: PagedCache) -> Tensor:
        """Hidden states [tokens, hidden] after the last norm; writes the cache."""
        ...

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, hidden] -> logits [rows, vocab]; in `out`, contiguous, if it is given."""
        ...


@runtime_checkable
class Encoder(Protocol):
    """The interface of models for pooling: they compute whole sequences, without a cache."""

    config: ModelConfig
    plans: Plans

    def encode(self, batch: Sequences) -> Tensor:
        """Hidden states [tokens, hidden] after the last norm."""
        ...

    def classify(self, hidden: Tensor, batch: Sequences) -> Tensor:
        """Logits [sequences, labels] of what `encode` returned; ConfigError if the model has no classifier."""
        ...


def nothing_special(fields: Fields, architecture: str) -> Mapping[str, Any]:
    """The configuration of a plain decoder: every entry as `parse_config` reads it."""
    return {}


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        name: the name for display.
        architectures: ``architectures`` of config.json -> its ``model_type``.
        table: the checkpoint tensors of a model.
        model: the class of models, constructed from (config, weights, plans): a `Model`, or an `Encoder`.
        config: fields of ModelConfig that differ from those of a plain decoder, from the entries of config.json and the architecture. A family
            whose configuration does not return ``windows`` refuses a sliding window.
        gguf: the ggml architectures of such models.
        prediction: the checkpoint tensors of the layer after the last, which predicts a further token (`gristmill.runtime.speculation.mtp`);
            None = such models have none.
        texts: architectures of models that also see or hear -> their text model, which alone is loaded.
        native: how directories in the layout of the models' own code are read.
        base: the module of the table's tensors that a checkpoint without a head leaves out of their names.
        entries: entries of config.json -> the names that they have in the files of such models, where these differ.
        defaults: for an architecture, entries that its files may leave out and whose values are then those of its class in transformers, where no
            shape of a tensor shows another value. An entry that is null stays null.
    """

    name: str
    architectures: Mapping[str, str]
    table: Callable[[ModelConfig], WeightTable]
    model: type[Model] | type[Encoder]
    config: Callable[[Fields, str], Mapping[str, Any]] = nothing_special
    gguf: tuple[GgufArchitecture, ...] = ()
    prediction: Callable[[ModelConfig], WeightTable] | None = None
    base: str = "model"
    native: NativeLayout | None = None
    texts: Mapping[str, TextPart] = field(default_factory=dict)
    entries: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def encodes(self) -> bool:
        """Whether its models are encoders, which generate nothing."""
        return not hasattr(self.model, "logits")


@cache
def _declared() -> Declarations[Family]:
    return find_declarations(__name__, "FAMILY", Family, ENTRY_POINTS, lambda family: [*family.architectures])


def families() -> Mapping[str, Family]:
    """All families by architecture, including those of plugins."""
    return _declared().by_name


def text_parts() -> Mapping[str, TextPart]:
    """Architectures of models that also see or hear -> their text model, which alone is loaded."""
    return {name: part for family in families().values() for name, part in family.texts.items()}


def native_layouts() -> tuple[NativeLayout, ...]:
    """How directories in the layouts of the models' own code are read."""
    return tuple({id(f.native): f.native for f in families().values() if f.native is not None}.values())


def failures() -> tuple[PluginFailure, ...]:
    """Plugins of ``gristmill.models`` that failed to load, with reasons."""
    return _declared().failures


def reported() -> str:
    """The failures of plugins, for the message of an unknown architecture; "" if there are none."""
    return "".join(f"; {failure}" for failure in failures())


def model_table(config: ModelConfig) -> WeightTable:
    """The declared table of checkpoint tensors of a model."""
    return families()[config.architecture].table(config)


def build_model(config: ModelConfig, weights: Weights, plans: Plans) -> Model:
    """The model with its parameters.

    Raises:
        CheckpointError: a tensor of the checkpoint is left over.
        UsageError: the requested scheme changes nothing.
    """
    make: Callable[..., Any] = families()[config.architecture].model
    model: Model = make(config, weights, plans)
    weights.check_scheme()
    weights.finish()
    return model


def build_encoder(config: ModelConfig, weights: Weights, plans: Plans) -> Encoder:
    """The model for pooling; as `build_model`. UsageError if its family computes no sequences without a cache."""
    make: Callable[..., Any] = families()[config.architecture].model
    if config.mla is not None:
        raise UsageError(
            f"{config.architecture}: latent attention needs a KV cache; such a model cannot pool"
        )
    model: Encoder = make(config, weights, plans)
    weights.check_scheme()
    weights.finish()
    return model


def make_layer(config: ModelConfig, weights: Weights, plans: Plans, index: int, rope: Rope) -> Any:
    """A single decoder layer. Called with (x, residual, batch, cache), it returns the x of the next layer."""
    family: Any = families()[config.architecture].model
    return family.make_layer(config, weights, plans, index, rope)
