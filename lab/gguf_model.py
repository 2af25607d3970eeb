"""GGUF files of random weights for measurements: the shapes of Qwen3-0.6B, with a vocabulary of its size.

    python -m lab.gguf_model --kind Q8_0 --layers 28 /tmp/qwen3-q8_0.gguf

The tokenizer has 151,936 entries and 151,387 merges as Qwen3's has, of random byte strings: files take as long to parse as real ones.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 1024, 16, 8, 128, 3072, 28
VOCABULARY, MERGES, SPECIAL = 151_936, 151_387, 26
EMBEDDING = "token_embd.weight"
KINDS = ("BF16", "F16", "Q8_0", "Q4_0", "Q4_K")


def byte_characters() -> list[str]:
    """The 256 characters that stand for bytes in GPT-2's vocabulary (Radford et al., 2019)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def vocabulary(entries: int, merges: int, seed: int = 0) -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges "left right" in order of priority, and token types: bytes, merged pairs, control tokens, unused ones."""
    chooser = random.Random(seed)
    tokens = byte_characters()
    known = set(tokens)
    pairs: list[str] = []
    while len(pairs) < merges:
        left, right = tokens[chooser.randrange(len(tokens))], tokens[chooser.randrange(len(tokens))]
        if len(left) + len(right) <= 12 and left + right not in known:
            pairs.append(f"{left} {right}")
            known.add(left + right)
            tokens.append(left + right)
    kinds = [1] * len(tokens)
    for index in range(entries - len(tokens)):
        tokens.append(f"<|special_{index}|>" if index < SPECIAL else f"[PAD{index}]")
        kinds.append(3 if index < SPECIAL else 5)
    return tokens, pairs, kinds


def blocks(shape: tuple[int, int], kind: str, generator: np.random.Generator) -> npt.NDArray[Any]:
    """Random values of a matrix in a type: floats, or whole blocks whose scales are small."""
    rows, columns = shape
    if kind in ("BF16", "F16"):
        values = generator.standard_normal(shape, dtype=np.float32) * np.float32(columns**-0.5)
        if kind == "F16":
            return values.astype(np.float16)
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint8)
    size, values_per_block, scales = {"Q8_0": (34, 32, 1), "Q4_0": (18, 32, 1), "Q4_K": (144, 256, 2)}[kind]
    data = generator.integers(0, 256, (rows, columns // values_per_block, size), dtype=np.uint8)
    levels = 128 if kind == "Q8_0" else 8 * (16 if kind == "Q4_K" else 1)
    scale = np.full((rows, columns // values_per_block, scales), columns**-0.5 / levels, dtype=np.float16)
    data[..., : 2 * scales] = scale.view(np.uint8)
    return data.reshape(rows, -1)


def write_model(
    path: Path,
    kind: str,
    layers: int,
    embedding: str | None,
    entries: int,
    merges: int,
) -> Path:
    """Write a file.

    Args:
        kind: ggml's type of the matrices.
        embedding: that of the embedding, which is also the logits head; None = kind.
    """
    import gguf

    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(layers)
    writer.add_context_length(40960)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    tokens, pairs, kinds = vocabulary(entries, merges)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(pairs)
    writer.add_eos_token_id(merges + 256)
    writer.add_add_bos_token(False)

    def put(name: str, shape: tuple[int, int], own: str = kind) -> None:
        writer.add_tensor(name, blocks(shape, own, generator), raw_dtype=gguf.GGMLQuantizationType[own])

    put(EMBEDDING, (entries, HIDDEN), embedding or kind)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, dtype=np.float32))
    for layer in range(layers):
        prefix = f"blk.{layer}."
        for name, size in (
            ("attn_norm", HIDDEN),
            ("ffn_norm", HIDDEN),
            ("attn_q_norm", HEAD_DIM),
            ("attn_k_norm", HEAD_DIM),
        ):
            writer.add_tensor(f"{prefix}{name}.weight", np.ones(size, dtype=np.float32))
        for name, shape in {
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }.items():
            put(f"{prefix}{name}.weight", shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@click.command()
@click.option("--kind", type=click.Choice(KINDS), default="Q8_0", show_default=True, help="Of the matrices.")
@click.option("--embedding", type=click.Choice(KINDS), help="Of the embedding. Default: as the matrices.")
@click.option("--layers", type=click.IntRange(1), default=LAYERS, show_default=True)
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
def main(kind: str, embedding: str | None, layers: int, path: Path) -> None:
    """Write a GGUF file of random weights."""
    write_model(path, kind, layers, embedding, VOCABULARY, MERGES)
    click.echo(f"{path}: {path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
