"""Texts per second of an encoder with mean pooling, beside sentence-transformers and transformers.

    python -m lab.embeddings --tokens 32,512 --threads 2 --out embeddings.json

The model is a directory, or by default one with random weights in the sizes of all-MiniLM-L6-v2. The engines take turns with the same texts:
gristmill as `LLM.embed` batches them, the others in batches of --batch texts sorted by length, which is how sentence-transformers does it. A
sample is the time for all texts, tokenization included. sentence-transformers is measured where it is installed; what transformers does is
written out here. ``error`` is the largest difference of an element of a vector from transformers', ``ratio`` the texts per second of gristmill
over those of the fastest other.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gristmill import LLM
from gristmill.autotune.environment import environment
from gristmill.autotune.place import place
from gristmill.bench.result_file import SCHEMA
from gristmill.runtime.explain import summarize
from lab.result import write_result

MINILM = "30522,384,6,12,1536"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
Embed = Callable[[list[str]], NDArray[np.float32]]


def write_random(folder: Path, sizes: list[int], longest: int) -> None:
    """A directory of sentence-transformers: BERT with random weights, a tokenizer of single words, mean pooling, length 1."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary, hidden, layers, heads, ffn = sizes
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=ffn,
        max_position_embeddings=longest,
    )
    BertModel(config).save_pretrained(folder)
    words = {word: index for index, word in enumerate(SPECIAL)} | {f"w{i}": i for i in range(5, vocabulary)}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(
        zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True)
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=longest, **names).save_pretrained(
        folder
    )
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    for _, path in kinds:
        (folder / path).mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": hidden, "pooling_mode_mean_tokens": True}
    for name, data in (
        ("modules.json", modules),
        ("1_Pooling/config.json", pooling),
        ("2_Normalize/config.json", {}),
        ("sentence_bert_config.json", {"max_seq_length": longest, "do_lower_case": False}),
    ):
        (folder / name).write_text(json.dumps(data))


def texts_of(llm: LLM, count: int, tokens: int, spread: float) -> list[str]:
    """Texts of random words, of `tokens` tokens, or of 1 - spread to 1 of them."""
    words = [
        word
        for i in range(llm.config.vocab_size)
        if (word := llm.tokenizer.token(i)) is not None
        and word.isalnum()
        and len(llm.tokenizer.encode(word, False)) == 1
    ]
    draw, added = random.Random(tokens), len(llm.tokenizer.encode(words[0])) - 1
    lengths = [max(1, round(tokens * (1 - spread * draw.random())) - added) for _ in range(count)]
    return [" ".join(draw.choices(words, k=length)) for length in lengths]


def transformers_engine(folder: Path, device: str, batch: int) -> Embed:
    """Padded batches of texts sorted by length, the mean over tokens, length 1."""
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = (
        AutoModel.from_pretrained(folder).to(device).eval(),
        AutoTokenizer.from_pretrained(folder),
    )

    @torch.inference_mode()
    def embed(texts: list[str]) -> NDArray[np.float32]:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        out = np.empty((len(texts), model.config.hidden_size), np.float32)
        for begin in range(0, len(order), batch):
            part = order[begin : begin + batch]
            given = tokenizer([texts[i] for i in part], padding=True, return_tensors="pt").to(device)
            mask = given["attention_mask"][..., None].float()
            mean = (model(**given).last_hidden_state * mask).sum(1) / mask.sum(1)
            out[part] = torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()
        return out

    return embed


def sentence_transformers_engine(folder: Path, device: str, batch: int) -> Embed:
    """sentence-transformers itself."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device=device)

    def embed(texts: list[str]) -> NDArray[np.float32]:
        made: NDArray[np.float32] = model.encode(texts, batch_size=batch, show_progress_bar=False)
        return made

    return embed


def measure(engines: dict[str, Embed], texts: list[str], rounds: int) -> list[dict[str, Any]]:
    """A row per engine; the engines take turns."""
    vectors = {name: embed(texts) for name, embed in engines.items()}
    samples: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, embed in engines.items():
            begin = time.perf_counter()
            embed(texts)
            samples[name].append(time.perf_counter() - begin)
    return [
        {
            "engine": name,
            "texts_per_s": len(texts) / statistics.median(samples[name]),
            "seconds": samples[name],
            "error": float(np.abs(vectors[name] - vectors["transformers"]).max()),
        }
        for name in engines
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="a sentence-transformers directory with mean pooling and length 1"
    )
    parser.add_argument(
        "--sizes", default=MINILM, help="of random weights: vocabulary, hidden, layers, heads, feed-forward"
    )
    parser.add_argument(
        "--tokens",
        default="32,512",
        help="tokens of a text; a model with random weights takes the most of them",
    )
    parser.add_argument("--texts", type=int, default=0, help="0 = as many as have 8192 tokens, at least 16")
    parser.add_argument(
        "--spread", type=float, default=0.0, help="texts have this share fewer tokens at most"
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lengths = [int(each) for each in args.tokens.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.model or Path(temporary)
        if args.model is None:
            write_random(folder, [int(each) for each in args.sizes.split(",")], max(lengths))
        llm = LLM(folder, device=args.device)
        engines: dict[str, Embed] = {
            "gristmill": lambda texts: np.stack([each.vector for each in llm.embed(texts)]),
            "transformers": transformers_engine(folder, args.device, args.batch),
        }
        if find_spec("sentence_transformers") is not None:
            engines["sentence-transformers"] = sentence_transformers_engine(folder, args.device, args.batch)
        rows = []
        for tokens in lengths:
            texts = texts_of(llm, args.texts or max(16, 8192 // tokens), tokens, args.spread)
            of_length = measure(engines, texts, args.rounds)
            others = max(row["texts_per_s"] for row in of_length[1:])
            rows += [{"tokens": tokens, "texts": len(texts), **row} for row in of_length]
            ratio = of_length[0]["texts_per_s"] / others
            rows[-len(of_length)]["ratio"] = ratio
            print(
                f"{tokens} tokens: ",
                *(f"{row['engine']} {row['texts_per_s']:.1f}/s" for row in of_length),
                f"ratio {ratio:.2f}",
            )
        command = shlex.join(["python", "-m", "lab.embeddings", *sys.argv[1:]])
        packages = ("torch", "transformers", "sentence-transformers")
        settings = {"model": args.sizes if args.model is None else args.model.name, "threads": args.threads}
        settings |= {"batch": args.batch, "spread": args.spread}
        settings |= {
            name: version(name) for name in packages if find_spec(name.replace("-", "_")) is not None
        }
        about = environment(place(args.device).target, command) | {"settings": settings}
        about["kernels"] = summarize(llm.explain())
        write_result(args.out, {"schema": SCHEMA, "about": about, "rows": rows})


if __name__ == "__main__":
    main()
