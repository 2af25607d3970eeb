"""Checkpoint formats: from the tensors that others wrote to QuantTensor. See `contract`; one module a format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gristmill.quant.formats.awq import Awq
from gristmill.quant.formats.compressed_tensors import CompressedTensors
from gristmill.quant.formats.contract import Format, FormatError, Source, StoredWeight, Tensors
from gristmill.quant.formats.deepseek_fp8 import DeepSeekFp8
from gristmill.quant.formats.gguf import Gguf
from gristmill.quant.formats.gptq import Gptq
from gristmill.quant.formats.gristmill import Gristmill
from gristmill.quant.formats.modelopt import ModelOpt
from gristmill.quant.formats.mxfp4 import Mxfp4

FORMATS: Mapping[str, Callable[[Mapping[str, Any], str], Format]] = {
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": DeepSeekFp8,
    "gguf": Gguf,
    "gptq": Gptq,
    "gristmill": Gristmill,
    "modelopt": ModelOpt,
    "mxfp4": Mxfp4,
}
"""``quant_method`` of config.json -> the format's reader."""


def open_format(config: Mapping[str, Any], where: str = "quantization_config") -> Format:
    """The format that a quantization configuration describes.

    where: what the configuration is called in messages.

    Raises:
        FormatError: an unknown method, or a configuration that its format does not read.
    """
    method = config.get("quant_method")
    if method is None and ("quantization" in config or "quant_algo" in config):
        method = "modelopt"
    if isinstance(method, str) and method.startswith("modelopt"):  # modelopt_fp4 and the like
        method = "modelopt"
    if not isinstance(method, str) or method not in FORMATS:
        raise FormatError(f"{where}: quant_method {method!r} is not supported; known: {', '.join(FORMATS)}")
    return FORMATS[method](config, where)


__all__ = ["FORMATS", "Format", "FormatError", "Source", "StoredWeight", "Tensors", "open_format"]
