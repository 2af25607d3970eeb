"""A small random encoder of each family, as transformers makes and saves it, and sentence-transformers directories around it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCABULARY = 300
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 320,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "Model", {}),
    "bert with other sizes": (
        "Bert",
        "Model",
        {"num_attention_heads": 2, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1}
        | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "type_vocab_size": 3},
    ),
    "bert with a language head": ("Bert", "ForMaskedLM", {"hidden_act": "relu"}),
    "bert classifier": ("Bert", "ForSequenceClassification", {"num_labels": 3}),
    "roberta": ("Roberta", "Model", {"pad_token_id": 1, "type_vocab_size": 1}),
    "roberta with a language head": (
        "Roberta",
        "ForMaskedLM",
        {"pad_token_id": 1, "tie_word_embeddings": False},
    ),
    "xlm-r": ("XLMRoberta", "Model", {"pad_token_id": 4, "num_attention_heads": 8, "type_vocab_size": 1}),
    "xlm-r classifier": (
        "XLMRoberta",
        "ForSequenceClassification",
        {"pad_token_id": 1, "num_labels": 1, "type_vocab_size": 1},
    ),
    "modernbert": ("ModernBert", "Model", {"local_attention": 20, "num_hidden_layers": 7}),
    "modernbert with biases": (
        "ModernBert",
        "ForMaskedLM",
        {"local_attention": 1000, "attention_bias": True, "mlp_bias": True, "norm_bias": True}
        | {"num_attention_heads": 2, "hidden_activation": "gelu_pytorch_tanh"},
    ),
    "modernbert classifier": (
        "ModernBert",
        "ForSequenceClassification",
        {"num_labels": 2, "local_attention": 6, "classifier_bias": True, "classifier_pooling": "mean"},
    ),
    "modernbert classifier of the first token": (
        "ModernBert",
        "ForSequenceClassification",
        {"num_labels": 1},
    ),
    "camembert": ("Camembert", "Model", {"pad_token_id": 1}),
    "camembert with a language head": ("Camembert", "ForMaskedLM", {"pad_token_id": 1}),
    "camembert classifier": ("Camembert", "ForSequenceClassification", {"pad_token_id": 1, "num_labels": 2}),
    "roberta classifier": ("Roberta", "ForSequenceClassification", {"pad_token_id": 1, "num_labels": 3}),
    "xlm-r with a language head": ("XLMRoberta", "ForMaskedLM", {"pad_token_id": 1}),
    # Files of DistilBERT have the sizes under names of their own; entries of SIZES that it does not know stay in config.json.
    "distilbert": ("DistilBert", "Model", {"hidden_dim": 80}),
    "distilbert with a language head": (
        "DistilBert",
        "ForMaskedLM",
        {"hidden_dim": 112, "activation": "relu", "n_heads": 2, "sinusoidal_pos_embds": True},
    ),
    "distilbert classifier": ("DistilBert", "ForSequenceClassification", {"hidden_dim": 80, "num_labels": 3}),
    "mpnet": ("MPNet", "Model", {"pad_token_id": 1}),
    "mpnet with a language head": (
        "MPNet",
        "ForMaskedLM",
        {"pad_token_id": 1, "num_attention_heads": 2, "num_hidden_layers": 2, "layer_norm_eps": 1e-5},
    ),
    "mpnet classifier": ("MPNet", "ForSequenceClassification", {"pad_token_id": 1, "num_labels": 4}),
}
ARCHITECTURES = {name: f"{family}{kind}" for name, (family, kind, _) in CASES.items()}
LENGTHS = (40, 1, 257, 2, 7, 65, 128, 1)


def build(name: str, folder: Path, **changes: Any) -> Any:
    """Saves the model of a case, and returns it. No parameter has its initial value: norms and biases are random too."""
    import transformers

    family, kind, settings = CASES[name]
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings, **changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}{kind}")(config).float().eval()
    perturb(model)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def perturb(model: Any) -> None:
    """Random values for every parameter: initial ones of norms and biases would hide that they are left out."""
    for name, tensor in model.named_parameters():
        if tensor.dim() == 1:
            tensor += 0.3 * torch.randn_like(tensor)
        else:
            tensor.normal_(0, 0.5 if "embeddings" in name else 1.5 / tensor.shape[-1] ** 0.5)


def ids(length: int, start: int = 0) -> list[int]:
    """Token ids that do not repeat with a short period, without those of special tokens."""
    return [5 + (7 * i * i + 3 * i + 11) % (VOCABULARY - 5) for i in range(start, start + length)]


@torch.no_grad()
def hidden_states(model: Any, tokens: Sequence[int], types: Sequence[int] | None = None) -> Tensor:
    """transformers' hidden states [tokens, hidden] of one sequence, computed alone where the model is; they are on the CPU."""
    more = {} if types is None else {"token_type_ids": torch.tensor([list(types)], device=model.device)}
    given = torch.tensor([list(tokens)], device=model.device)
    states: Tensor = model.base_model(given, **more).last_hidden_state[0]
    return states.cpu()


def write_modules(
    folder: Path,
    pooling: dict[str, Any] | None = None,
    dense: Sequence[dict[str, Any]] = (),
    normalize: bool = False,
    prompts: dict[str, Any] | None = None,
    package: str = "sentence_transformers.models",
) -> None:
    """Writes what sentence-transformers has next to a model. Each of `dense` has the entries of its config.json and its tensors."""
    modules = [("Transformer", "")]
    if pooling is not None:
        modules.append(("Pooling", "1_Pooling"))
        _write(folder / "1_Pooling" / "config.json", pooling)
    for given in dense:
        place = f"{len(modules)}_Dense"
        modules.append(("Dense", place))
        tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
        config = {key: value for key, value in given.items() if key not in tensors}
        _write(folder / place / "config.json", config)
        save_file(tensors, folder / place / "model.safetensors")
    if normalize:
        modules.append(("Normalize", f"{len(modules)}_Normalize"))
    entries = [
        {"idx": i, "name": str(i), "path": place, "type": f"{package}.{kind}"}
        for i, (kind, place) in enumerate(modules)
    ]
    _write(folder / "modules.json", entries)
    if prompts is not None:
        _write(folder / "config_sentence_transformers.json", prompts)


def _write(path: Path, data: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data))


def write_tokenizer(folder: Path) -> Any:
    """Writes and returns a tokenizer of words w5, w6, ... with BERT's special tokens; it cuts and pads as files of old programs do."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
    vocabulary |= {f"w{i}": i for i in range(5, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def text(length: int, start: int = 0) -> str:
    """The words whose ids `ids` returns."""
    return " ".join(f"w{token}" for token in ids(length, start))
