"""The text model of checkpoints that also have an encoder of images: logits and ids are transformers' of the whole model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gristmill.runtime.llm import LLM
from gristmill.runtime.loader.config import load_config, open_checkpoint
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.tools.evaluate import window_logits
from tests.runtime import oracle
from tests.runtime.family_cases import CASES, SIZES, YARN, prompt
from tests.runtime.proofs import GREEDY, proves

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (CASES["gemma-3"][1], {"mm_tokens_per_image": 4}),
    "Gemma4": (
        {**CASES["gemma-4-e2b"][1], "pad_token_id": 0},
        {
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "position_embedding_size": 16,
            },
            "image_token_id": 299,
        },
    ),
    "Mistral3": (
        {"model_type": "ministral3", "head_dim": 16}
        | {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.4}},
        {"vision_config": {**VISION, "head_dim": 16, "model_type": "pixtral"}},
    ),
    "Llama4": (CASES["llama-4"][1], {"vision_config": {**VISION, "vision_output_dim": 32}}),
}
"""Family -> settings of the text model, and of the whole."""


def build(family: str, folder: Path) -> Any:
    import transformers

    text, more = WHOLE[family]
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(
        **{"text_config": {**SIZES, **text}, "vision_config": VISION, "image_token_index": 299, **more}
    )
    config._attn_implementation = config.text_config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dim() == 1 and tensor.is_floating_point():
                tensor += 0.3 * torch.randn_like(tensor)
            elif tensor.dim() > 1 and tensor.is_floating_point():
                tensor.normal_(0, 1.5 / tensor.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return model


@proves(
    "logits and ids",
    GREEDY,
    {family: f"{family}ForConditionalGeneration" for family in WHOLE},
    by="family",
)
@pytest.mark.parametrize("family", WHOLE)
def test_logits_and_ids(family: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    model, ids = build(family, tmp_path), [i % 299 for i in prompt(100)]
    llm = make(tmp_path, max_chunk=48)
    expected = oracle.logits(model, ids)
    assert float((window_logits(llm.engine, ids) - expected).abs().max() / expected.abs().max()) < 1e-4
    (done,) = llm.generate([ids[:30]], SamplingParams(max_tokens=8, temperature=0))
    compared = oracle.Comparison(family)
    compared.add(done.token_ids, oracle.answer_along(model, ids[:30], done.token_ids, 8))
    assert not any("vision" in name or "projector" in name for name in open_checkpoint(tmp_path))


def test_other_names_and_entries_left_out(tmp_path: Path) -> None:
    """transformers 4.52 to 4.57 put the text model under ``model``; files of Gemma 3 leave out what is as in its class."""
    build("Gemma3", tmp_path)
    file = tmp_path / "model.safetensors"
    names = {"language_model.model.": "model.language_model.", "vision_tower.": "model.vision_tower."}
    tensors = load_file(file)
    for old, new in names.items():
        tensors = {f"{new}{k.removeprefix(old)}" if k.startswith(old) else k: v for k, v in tensors.items()}
    before = set(open_checkpoint(tmp_path))
    save_file(tensors, file, metadata={"format": "pt"})
    assert set(open_checkpoint(tmp_path)) == before
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for entry in ("vocab_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"):
        del config["text_config"][entry]
    path.write_text(json.dumps(config))
    read = load_config(tmp_path)
    assert (read.vocab_size, read.num_heads, read.num_kv_heads, read.max_position) == (262208, 8, 4, 131072)


def test_null_is_not_the_value_of_the_class(tmp_path: Path) -> None:
    """Mistral has a window unless its file says that there is none, and Llama 4 chunks."""
    build("Mistral3", tmp_path / "mistral")
    config = json.loads((tmp_path / "mistral" / "config.json").read_text())
    assert config["text_config"]["sliding_window"] is None
    assert load_config(tmp_path / "mistral").windows == (0,) * 4
    build("Llama4", tmp_path / "llama")
    path = tmp_path / "llama" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["attention_chunk_size"] = None
    path.write_text(json.dumps(config))
    assert not any(load_config(tmp_path / "llama").chunks)
