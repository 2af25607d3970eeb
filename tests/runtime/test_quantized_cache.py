"""Models with an e4m3 KV cache: transformers with the same rounding as the oracle, checkpoint scales, memory,
chunks, refusals."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from gristmill.runtime.errors import CheckpointError, UsageError
from gristmill.runtime.kv_cache.paged import FORMATS, token_bytes
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.tools.cli import cli
from gristmill.tools.evaluate import window_logits
from tests.runtime import kernel_sets
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS, oracle, prompts, window

LAYERS, KV_HEADS = 6, 2
SCHEME = {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False, "symmetric": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "config_groups": {},
    "kv_cache_scheme": SCHEME,
}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "kv_cache_quant_algo": "FP8",
    "exclude_modules": ["*"],
}


def scales(layer: int, which: str, count: int = KV_HEADS) -> torch.Tensor:
    """Returns scales of a layer's keys or values: of a suitable size, and all different."""
    generator = torch.Generator().manual_seed(2 * layer + (which == "v"))
    return 2 ** (-6 + 2 * torch.rand(count, generator=generator))


def checkpoint(
    folder: Path, quantization: dict[str, Any] | None, make: Callable[[int, str], tuple[str, torch.Tensor]]
) -> Path:
    """Writes docs-llama with a quantization_config, and with the tensor that `make` gives for each layer's
    keys and values."""
    out = folder / "model"
    shutil.copytree(MODELS / LLAMA, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(
        json.dumps(config | ({"quantization_config": quantization} if quantization else {}))
    )
    tensors = load_file(out / "model.safetensors")
    for layer in range(LAYERS):
        for which in "kv":
            name, value = make(layer, which)
            tensors[f"model.layers.{layer}.self_attn.{name}"] = value
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def per_head(layer: int, which: str) -> tuple[str, torch.Tensor]:
    return f"{which}_scale", scales(layer, which)[:, None, None]


def per_tensor(layer: int, which: str) -> tuple[str, torch.Tensor]:
    return f"{which}_proj.{which}_scale", scales(layer, which, 1)[0]


@torch.inference_mode()
def expected_logits(
    ids: list[int], scale_of: Callable[[int, str, torch.Tensor], torch.Tensor] | None
) -> torch.Tensor:
    """Returns transformers' logits with each key and value of the attention rounded to e4m3 with these
    scales."""
    from transformers import DynamicCache

    class Rounded(DynamicCache):
        def update(
            self, keys: torch.Tensor, values: torch.Tensor, layer: int, *rest: Any, **named: Any
        ) -> Any:
            parts = []
            for which, part in (("k", keys), ("v", values)):  # [1, kv_heads, tokens, head_dim]
                if scale_of is not None:
                    scale = scale_of(layer, which, part)
                    codes = (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
                    part = codes.float() * scale
                parts.append(part)
            return super().update(*parts, layer, *rest, **named)

    return oracle(LLAMA)(torch.tensor([ids]), past_key_values=Rounded(), use_cache=True).logits[0]


def by_head(layer: int, which: str, part: torch.Tensor) -> torch.Tensor:
    return scales(layer, which)[None, :, None, None]


def by_tensor(layer: int, which: str, part: torch.Tensor) -> torch.Tensor:
    return scales(layer, which, 1)


def of_one(layer: int, which: str, part: torch.Tensor) -> torch.Tensor:
    return torch.ones(1)


def by_token(layer: int, which: str, part: torch.Tensor) -> torch.Tensor:
    return part.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448


def part_of_rounding(llm: LLM, scale_of: Any) -> float:
    """Returns the RMS difference of our logits from the oracle's, relative to the effect of rounding the
    cache."""
    ids = window(3, 200)
    rounded, plain = expected_logits(ids, scale_of), expected_logits(ids, None)
    return float(
        (window_logits(llm.engine, ids) - rounded).square().mean().sqrt()
        / (rounded - plain).square().mean().sqrt()
    )


CASES = [
    ("fp8", COMPRESSED, per_head, by_head),
    ("fp8", MODELOPT, per_tensor, by_tensor),
    ("fp8_token_head", COMPRESSED, per_head, by_token),
]


@pytest.mark.parametrize(
    ("kv_dtype", "config", "make_scale", "scale_of"), CASES, ids=["per head", "per tensor", "per token"]
)
def test_logits_are_those_of_the_rounded_cache(
    kv_dtype: str, config: Any, make_scale: Any, scale_of: Any, tmp_path: Path, make: Callable[..., LLM]
) -> None:
    """A code on a tie may round differently. A forgotten or exchanged scale changes more than the rounding
    itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm = make(checkpoint(tmp_path, config, make_scale), kv_dtype=kv_dtype)
    assert part_of_rounding(llm, scale_of) < 0.15
    if kv_dtype == "fp8":
        attention = llm.model.layers[3].attention
        k_scale, v_scale = attention.scales
        for wrong in (
            (v_scale, k_scale),
            (k_scale.roll(1, -1) * (1 if k_scale.numel() > 1 else 1.3), v_scale),
        ):
            attention.scales = wrong
            assert part_of_rounding(llm, scale_of) > 0.3


@pytest.mark.parametrize("kernel_set", [*kernel_sets.FAST, pytest.param("triton", marks=pytest.mark.slow)])
def test_every_set_of_kernels(kernel_set: str, make_strict: Callable[..., LLM]) -> None:
    """Without scales, 1.0 is used, with a warning."""
    with pytest.warns(UserWarning, match="no scales of the KV cache for 6 of 6 layers: 1.0 is used"):
        llm = make_strict(LLAMA, kernel_set, kv_dtype="fp8", num_blocks=16)
    ids = window(3, 24 if kernel_set == "triton" else 200)
    rounded, plain = expected_logits(ids, of_one), expected_logits(ids, None)
    error = (window_logits(llm.engine, ids) - rounded).square().mean().sqrt()
    assert error < 0.15 * (rounded - plain).square().mean().sqrt()
    kernel_sets.check(llm, kernel_set)


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_token_head"])
@pytest.mark.filterwarnings("ignore:.*no scales of the KV cache")
def test_ids_do_not_depend_on_chunks_cache_or_preemption(kv_dtype: str, make: Callable[..., LLM]) -> None:
    """Chunked and shared prompts, and requests that are computed again, read codes that other requests wrote."""
    params, selected = SamplingParams(max_tokens=24), prompts()[2:14:3] + prompts()[2:14:3]
    uncached = make(LLAMA, kv_dtype=kv_dtype, enable_prefix_cache=False)
    expected = [uncached.generate([prompt], params)[0].token_ids for prompt in selected]
    for options in (
        {"max_chunk": 7},
        {"block_size": 64, "max_chunk": 50},
        {"num_blocks": 12, "max_batch_tokens": 64},
    ):
        llm = make(LLAMA, kv_dtype=kv_dtype, **options)
        assert [one.token_ids for one in llm.generate(selected, params)] == expected, options
        assert [one.token_ids for one in llm.generate(selected[:2], params)] == expected[:2], options
        llm.engine.scheduler.check()


@pytest.mark.filterwarnings("ignore:.*no scales of the KV cache")
def test_memory(make: Callable[..., LLM]) -> None:
    """The same memory holds twice the blocks of bf16; with scales of tokens, 2 / (1 + 4 / 64) times."""
    blocks = {}
    for name, form in FORMATS.items():
        engine = make(LLAMA, kv_dtype=name, dtype="bf16", num_blocks=None, memory=4 << 20).engine
        cache, config = engine.runner.cache, engine.runner.model.config
        blocks[name] = engine.scheduler.config.num_blocks
        assert cache.nbytes == blocks[name] * 16 * token_bytes(config, torch.bfloat16, form) <= 4 << 20
        assert cache.layers[0][0].dtype is (torch.bfloat16 if name == "auto" else torch.float8_e4m3fn)
        assert len(cache.layers[5]) == (4 if form.token_scales else 2)
    assert blocks["fp8"] == 2 * blocks["auto"] and blocks["fp8_token_head"] == int(
        blocks["auto"] * 2 / (1 + 4 / 64)
    )


def test_scales_are_ignored_without_a_quantized_cache(tmp_path: Path, make: Callable[..., LLM]) -> None:
    llm, ids = make(checkpoint(tmp_path, COMPRESSED, per_head)), window(3, 40)
    assert torch.allclose(window_logits(llm.engine, ids), expected_logits(ids, None), atol=1e-4)


REFUSED = [
    (
        {**COMPRESSED, "kv_cache_scheme": {**SCHEME, "type": "int"}},
        per_head,
        UsageError,
        "scales of a KV cache in int8, not in fp8",
    ),
    (
        {**MODELOPT, "kv_cache_quant_algo": "NVFP4"},
        per_tensor,
        UsageError,
        "scales of a KV cache in nvfp4, not in fp8",
    ),
    (
        COMPRESSED,
        lambda i, which: (f"{which}_scale", torch.ones(3)),
        CheckpointError,
        r"one number or one per KV head \(2\)",
    ),
    (COMPRESSED, lambda i, which: (f"{which}_scale", torch.zeros(1)), CheckpointError, "finite and positive"),
    (
        COMPRESSED,
        lambda i, which: ("k_scale", torch.ones(1)),
        CheckpointError,
        "k_scale and not that of its other cache",
    ),
]


@pytest.mark.parametrize(
    ("config", "make_scale", "kind", "message"), REFUSED, ids=[message for *_, message in REFUSED]
)
def test_refusals(
    config: Any,
    make_scale: Any,
    kind: type[Exception],
    message: str,
    tmp_path: Path,
    make: Callable[..., LLM],
) -> None:
    with pytest.raises(kind, match=message):
        make(checkpoint(tmp_path, config, make_scale), kv_dtype="fp8")


def test_names_and_models_that_cannot(make: Callable[..., LLM]) -> None:
    with pytest.raises(UsageError, match="unknown kv_dtype 'int3'; known: auto, fp8, fp8_token_head"):
        make(LLAMA, kv_dtype="int3")
    with pytest.raises(UsageError, match="unknown kv_dtype 'bf16'"):
        make(LLAMA, kv_dtype="bf16")
    for kv_dtype in ("fp8", "fp8_token_head"):
        with pytest.raises(UsageError, match=r"a latent cache \(MLA\) is not quantized; use kv_dtype='auto'"):
            make(DEEPSEEK, kv_dtype=kv_dtype)


@pytest.mark.filterwarnings("ignore:.*no scales of the KV cache")
def test_names_of_fp8(make: Callable[..., LLM]) -> None:
    for name in ("fp8", "fp8_e4m3", torch.float8_e4m3fn):
        assert make(LLAMA, kv_dtype=name).model.plans.cache_format is FORMATS["fp8"]


def test_the_command_line(policy_file: Callable[..., Path]) -> None:
    policy_file()
    line = ["generate", "--model", str(MODELS / LLAMA), "--prompt", "The index", "--max-tokens", "4"]
    result = CliRunner().invoke(cli, [*line, "--kv-dtype", "fp8_token_head", "--explain", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["explain"]
    assert [
        row for row in rows if row["op"] == "paged_attention" and "kv=fp8,kv_scale=token" in row["problem"]
    ]
    result = CliRunner().invoke(cli, [*line, "--kv-dtype", "fp9"])
    assert isinstance(result.exception, UsageError) and "unknown kv_dtype 'fp9'" in str(result.exception)
