"""GGUF files that tests write with the gguf package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


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


def finish(writer: Any) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
