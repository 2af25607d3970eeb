"""Which of vLLM's layers run on gristmill: those that are faster so, by times of this device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm.config import get_current_vllm_config

from gristmill.integrations.measured import Call, Case, compare
from gristmill.integrations.vllm.trial import NoMethodError, UntimedError, served
from gristmill.integrations.vllm.version import HOST

LEFT = "gristmill_left_to_vllm"
"""The entry of vLLM's additional_config that names the layers of `_note_choice`."""


@dataclass(frozen=True)
class Choice:
    """Whether a layer is taken.

    Attributes:
        reason: why vLLM's own method keeps it; None if it is taken.
        times: why it is taken.
    """

    reason: str | None
    times: str = ""


def choose(
    prefix: str,
    label: str,
    name: Callable[[], str],
    case: Callable[[str], Case],
    theirs: Callable[[], Call],
    device: torch.device,
) -> Choice:
    """Times decide; a layer that vLLM's own method does not serve is taken, one that cannot be timed is left.

    Args:
        label: scheme and sizes.
        name: vLLM's own method, by name.
        case: the case of a method.
        theirs: the product of vLLM's own method with arbitrary weights.
    """
    try:
        method = f"{_version()} {served(name)}"
        comparison = compare(case(method), device, lambda: served(theirs))
    except NoMethodError as error:
        return Choice(None, f"vLLM's own method does not serve it: {error}")
    except UntimedError as error:
        _note_choice(label)
        return Choice(f"vLLM's own method cannot be timed beside gristmill's kernel: {error}")
    except Exception as error:
        error.add_note(
            f"gristmill timed vLLM's own method of {prefix} beside its kernel, with several copies of the weight; "
            """--additional-config '{"gristmill": {"take": "all"}}' takes every layer untimed"""
        )
        raise
    if comparison.ahead:
        return Choice(None, str(comparison))
    _note_choice(label)
    return Choice(f"it is not faster on gristmill: {comparison}")


@functools.cache
def _version() -> str:
    """vLLM's own method; a version that is not tested is reported once."""
    return HOST.require()


def _note_choice(left: str) -> None:
    """Make a layer that is left to vLLM part of the key of vLLM's compiled graphs: they hold the operators of one choice."""
    config = get_current_vllm_config().additional_config
    if isinstance(config, dict):
        config[LEFT] = sorted({*config.get(LEFT, ()), left})
