"""GGUF files that tests write with the gguf package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def new_writer(path: Path, architecture: str, config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns (a writer that has the sizes of a config.json, gguf's table of the names of its tensors)."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    return writer, gguf.get_tensor_name_map(kinds[architecture], config["num_hidden_layers"])


def quantize(data: np.ndarray, kind: str) -> np.ndarray:
    """Returns blocks of float32 rows by the gguf package, which has no quantizer of Q4_K."""
    import gguf

    if kind != "Q4_K":
        return gguf.quants.quantize(data, gguf.GGMLQuantizationType[kind])
    x = data.reshape(-1, 8, 32)
    low = np.minimum(x.min(-1), 0)
    step = (x.max(-1) - low) / 15
    d, dmin = (np.float16(each.max(-1, keepdims=True) / 63 + 1e-6) for each in (step, -low))
    scales, mins = (np.clip(np.round(a / b), 0, 63).astype(np.uint8) for a, b in ((step, d), (-low, dmin)))
    factor = np.maximum(d.astype(np.float32) * scales, 1e-9)
    codes = np.round((x + (dmin.astype(np.float32) * mins)[..., None]) / factor[..., None])
    codes = np.clip(codes, 0, 15).astype(np.uint8)
    parts = [
        d.view(np.uint8),
        dmin.view(np.uint8),
        scales[:, :4] | scales[:, 4:] >> 4 << 6,
        mins[:, :4] | mins[:, 4:] >> 4 << 6,
        scales[:, 4:] & 15 | mins[:, 4:] << 4,
        (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(-1, 128),
    ]
    return np.concatenate(parts, -1).reshape(len(data), -1)


def finish(writer: Any) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
