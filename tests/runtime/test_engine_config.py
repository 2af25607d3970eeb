"""The options of an engine: declared once, and reachable from everything that makes one."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Any

import click
import numpy as np
import pytest

from gristmill import LLM, Engine, EngineConfig, SamplingParams, StructuredOutput
from gristmill.integrations.options import engine_options
from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_transfer.config import KVTransfer
from gristmill.runtime.parallel.replicas import Replicas
from gristmill.runtime.speculation.config import Speculation
from gristmill.tools.cli import cli
from gristmill.tools.declared_options import helps, options_of

NAMES = [field.name for field in fields(EngineConfig)]


@pytest.mark.parametrize("make", [Engine, LLM])
def test_engines_take_every_option(make: Callable[..., Any]) -> None:
    parameters = inspect.signature(make).parameters
    assert [*parameters] == ["model", *NAMES]
    assert all(parameters[field.name].default == field.default for field in fields(EngineConfig))


@pytest.mark.parametrize("name", ["generate", "eval", "warm"])
def test_commands_take_every_option(name: str) -> None:
    command = cli.commands[name]
    options = [parameter.name for parameter in command.get_params(click.Context(command))]
    assert len({*options}) == len(options)
    assert {"engine_seed" if name == "seed" else name for name in NAMES} <= {*options}
    if name == "generate":
        assert {field.name for field in fields(SamplingParams)} - {"bad_words"} <= {*options}


@pytest.mark.parametrize("declared", [EngineConfig, SamplingParams])
def test_every_option_is_explained(declared: type) -> None:
    assert helps(declared).keys() == {field.name for field in fields(declared)}
    texts = [option.help or "" for option in options_of(declared)]
    assert all(len(text) > 10 and "`" not in text and "None" not in text for text in texts), texts


def test_a_new_option_needs_no_second_place() -> None:
    @dataclass(frozen=True, kw_only=True)
    class More(EngineConfig):
        """Options.

        Args:
            watermark: blocks that stay free; None = by the
                device.
        """

        watermark: int | None = None

    assert More.of({"watermark": 3}).watermark == 3  # type: ignore[attr-defined]
    assert helps(More)["watermark"] == "Blocks that stay free. Default: by the device."


def test_hosts_take_every_option() -> None:
    assert engine_options(dict.fromkeys(NAMES)).keys() == {*NAMES}
    texts = {"max_seqs": "4", "decode_graphs": "false"}
    assert engine_options(texts) == {"max_seqs": 4, "decode_graphs": False}


def test_a_configuration_is_frozen_and_parsed() -> None:
    options = {"speculate": "ngram:4", "kv_transfer": "host:1MiB", "max_seqs": np.int64(3)}
    config = EngineConfig.of(options)
    assert isinstance(config.speculate, Speculation) and isinstance(config.kv_transfer, KVTransfer)
    assert type(config.max_seqs) is int and config == EngineConfig.of({**options, "max_seqs": 3})
    with pytest.raises(FrozenInstanceError):
        config.max_seqs = 4  # type: ignore[misc]


def test_a_size_of_the_cache_is_checked_before_anything_is_loaded() -> None:
    for memory in (0, -1, 0.0, 1.5, math.nan, math.inf, True, "1"):
        with pytest.raises(UsageError, match="memory must be bytes"):
            LLM("/absent", memory=memory)
    flag = EngineConfig(enable_prefix_cache=np.bool_(False)).enable_prefix_cache
    assert flag is False


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("max_seqs", 2**63, "max_seqs must be at most 2147483647, got 9223372036854775808"),
        ("rank_timeout", "300", "rank_timeout must be seconds, more than 0, got '300'"),
        ("rank_timeout", 0, "rank_timeout must be seconds, more than 0, got 0"),
        ("rank_timeout", math.nan, "rank_timeout must be seconds, more than 0, got nan"),
        ("rank_timeout", 10**400, "rank_timeout must be seconds, more than 0, got 1000"),
        ("queue_order", "lifo", "queue_order must be 'fcfs' or 'priority', got 'lifo'"),
    ],
)
def test_options_out_of_their_range(name: str, wrong: object, message: str) -> None:
    """Before anything is loaded, also where no other option has a use for them."""
    with pytest.raises(UsageError, match=message):
        LLM("/absent", **{name: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [LLM, Engine, lambda model, **options: Replicas(model, 2, **options)])
def test_unknown_options_are_refused_before_anything_is_loaded(make: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="an engine has no option 'max_seq'; did you mean max_seqs?"):
        make("/absent", max_seq=3)
    with pytest.raises(UsageError, match="an engine has no option 'zzz'; known: dtype, quant"):
        make("/absent", zzz=1)


def test_a_host_leaves_names_out() -> None:
    EngineConfig.require_known(["dtype", "max_seqs"], ["device"])
    with pytest.raises(UsageError, match="an engine has no option 'device'"):
        EngineConfig.require_known(["device"], ["device"])


def test_sampling_parameters_by_name() -> None:
    values = {"logit_bias": {"5": 1.5}, "structured_output": {"regex": "a+"}, "n": 2}
    made = SamplingParams.of(json.loads(json.dumps(values)))
    assert made == SamplingParams(logit_bias={5: 1.5}, structured_output=StructuredOutput(regex="a+"), n=2)
    assert SamplingParams.of(dict(vars(made))) == made
    for wrong, message in (
        ({"max_token": 3}, "SamplingParams has no max_token; known: max_tokens"),
        ({"structured_output": {"regexp": "a"}}, "structured output has no regexp; known: json_schema"),
        ({"logit_bias": {"a": 1}}, "logit_bias must map token ids to finite numbers, got 'a': 1"),
        ({5: 1}, "SamplingParams has no 5; known"),
    ):
        with pytest.raises(UsageError, match=message):
            SamplingParams.of(wrong)  # type: ignore[arg-type]
