"""Quantized checkpoints of other projects: the logits equal transformers' for the same values; every fault is
an error that names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gristmill.quant import quantize
from gristmill.quant.formats import open_format
from gristmill.runtime.errors import CheckpointError, ConfigError, UsageError
from gristmill.runtime.llm import LLM
from gristmill.tools.evaluate import window_logits
from tests.runtime import oracle, producers
from tests.runtime.oracle import ARCHITECTURES, DEEPSEEK, LLAMA
from tests.runtime.proofs import proves

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False}
INT3 = {"num_bits": 3, "type": "int", "strategy": "channel", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}


def by_compressed_tensors(*groups: tuple[list[str], str, dict[str, Any]]) -> Any:
    pytest.importorskip("compressed_tensors")
    return producers.compressed_tensors({f"group_{i}": group for i, group in enumerate(groups)})


CASES: dict[str, tuple[str, Callable[[], Any]]] = {
    "gptq act-order": (LLAMA, lambda: producers.gptq(True)),
    "gptq v2": (LLAMA, lambda: producers.gptq(False, v2=True)),
    "awq": (LLAMA, producers.awq),
    "modelopt nvfp4": (LLAMA, producers.modelopt_nvfp4),
    "modelopt nvfp4 pre_quant_scale": (
        LLAMA,
        lambda: producers.modelopt_nvfp4(("v_proj", "up_proj", "down_proj")),
    ),
    "compressed-tensors nvfp4": (
        LLAMA,
        lambda: by_compressed_tensors((["Linear"], "nvfp4-pack-quantized", NVFP4)),
    ),
    "compressed-tensors mixed": (
        LLAMA,
        lambda: by_compressed_tensors(
            ([r"re:.*\.(v|up)_proj"], "float-quantized", FP8),
            ([r"re:.*down_proj"], "pack-quantized", INT3),
            (["Linear"], "pack-quantized", INT4),
        ),
    ),
    "deepseek fp8": (DEEPSEEK, producers.fine_grained_fp8),
    "compressed-tensors int4 experts": (
        DEEPSEEK,
        lambda: by_compressed_tensors((["Linear"], "pack-quantized", INT4)),
    ),
}


@proves("quantized", "awq", "LlamaForCausalLM")
@proves("quantized", "gptq", "LlamaForCausalLM")
@proves("quantized", "modelopt", "LlamaForCausalLM")
@proves("quantized", "fp8", "DeepseekV3ForCausalLM")
@proves(
    "quantized",
    "compressed-tensors",
    {case: ARCHITECTURES[name] for case, (name, _) in CASES.items() if "compressed" in case},
    by="case",
)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_values(case: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    name, producer = CASES[case]
    directory, plain = producers.convert(name, tmp_path, *producer())
    ids = oracle.window(0)[:48]
    actual = window_logits(make(directory).engine, ids)
    expected = oracle.logits(oracle.load(plain), ids)
    error = float((actual - expected).abs().max() / expected.abs().max())
    assert error < 2e-4, f"{case}: {error}"


def test_transformers_reads_the_same_directory(make: Callable[..., LLM], tmp_path: Path) -> None:
    directory, _ = producers.convert(
        LLAMA, tmp_path, *by_compressed_tensors((["Linear"], "pack-quantized", INT4))
    )
    ids = oracle.window(1)[:48]
    actual = window_logits(make(directory).engine, ids)
    expected = oracle.logits(oracle.load(directory), ids)
    assert float((actual - expected).abs().max() / expected.abs().max()) < 2e-3


def test_fused_parts_keep_their_global_scales_bit_for_bit(make: Callable[..., LLM], tmp_path: Path) -> None:
    from gristmill.quant.checkpoints.safetensors import SafetensorsCheckpoint
    from gristmill.quant.checkpoints.weights import Weights
    from gristmill.runtime.loader.config import load_config
    from gristmill.runtime.models import model_table

    directory, plain = producers.convert(LLAMA, tmp_path, *producers.modelopt_nvfp4())
    config = load_config(directory)
    assert config.quantization is not None
    weights = Weights(
        SafetensorsCheckpoint(directory),
        model_table(config),
        torch.float32,
        torch.device("cpu"),
        None,
        open_format(config.quantization),
    )
    (part,) = weights.parts("layers.2.qkv")
    values = load_file(plain / "model.safetensors")
    fused = torch.cat([values[f"model.layers.2.self_attn.{p}_proj.weight"] for p in "qkv"])
    assert len({float(s) for s in part.weight.global_scale}) == 3
    assert torch.equal(part.weight.dequantize(), fused)


def test_dequantized_when_asked(make: Callable[..., LLM], tmp_path: Path) -> None:
    directory, plain = producers.convert(LLAMA, tmp_path, *producers.modelopt_nvfp4(("down_proj",)))
    ids = oracle.window(0)[:32]
    dequantized, values = make(directory, quant="fp32"), make(plain)
    assert torch.equal(window_logits(dequantized.engine, ids), window_logits(values.engine, ids))
    assert dequantized.weight_bytes == values.weight_bytes
    with pytest.raises(
        UsageError, match=r"quantized to nvfp4 already .*q_proj.*cannot be quantized to int4_g128"
    ):
        make(directory, quant="int4_g128")


def test_a_scheme_that_would_change_nothing_is_refused(make: Callable[..., LLM], tmp_path: Path) -> None:
    """A checkpoint that declares FP8 and stores every matrix in floats, as such of partial blocks are; one matrix in FP8 is enough to ask for it."""
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (tmp_path / "none").mkdir()
    directory, _ = producers.convert(LLAMA, tmp_path / "none", config, lambda module, w: None)
    for options in ({}, {"quant": "fp32"}):
        make(directory, **options)
    for scheme in ("int4_g128", "fp8_block.fp8_g128"):
        with pytest.raises(
            UsageError,
            match=rf"quant {scheme} changes nothing: .* declares the format fp8, .*down_proj.* load it without quant",
        ):
            make(directory, quant=scheme)

    def only_down(module: str, w: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor] | None:
        if not module.endswith("down_proj"):
            return None
        made = quantize(w, "fp8_block")
        assert made.scales is not None
        stored = {"weight": made.codes.view(torch.float8_e4m3fn), "weight_scale_inv": made.scales}
        return stored, made.dequantize()

    (tmp_path / "one").mkdir()
    directory, _ = producers.convert(LLAMA, tmp_path / "one", config, only_down)
    make(directory, quant="fp8_block.fp8_g128")


def test_activations_are_quantized_when_asked(make: Callable[..., LLM], tmp_path: Path) -> None:
    directory, _ = producers.convert(
        LLAMA,
        tmp_path,
        *by_compressed_tensors((["Linear"], "float-quantized", FP8 | {"strategy": "channel"})),
    )
    ids = oracle.window(0)[:48]
    plain, quantized = (
        window_logits(make(directory, **o).engine, ids) for o in ({}, {"quant": "fp8_ch.fp8_token"})
    )
    assert not torch.equal(plain, quantized)
    assert float((plain - quantized).abs().max() / plain.abs().max()) < 0.2


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return producers.convert(LLAMA, tmp_path_factory.mktemp("nvfp4"), *producers.modelopt_nvfp4())[0]


def changed(source: Path, out: Path, change: Callable[[dict[str, torch.Tensor]], Any], **config: Any) -> Path:
    out.mkdir()
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    data = json.loads((source / "config.json").read_text())
    data["quantization_config"].update(config)
    (out / "config.json").write_text(json.dumps(data))
    (out / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    return out


Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "config", "says"),
    [
        (
            lambda t: t.pop(f"{Q}.weight_scale_2"),
            {},
            f"{Q} is stored as NVFP4, which needs tensor {Q}.weight_scale_2; found",
        ),
        (
            lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"][:, 1:].contiguous()}),
            {},
            rf"model.safetensors: tensor {Q}.weight_scale must have shape \[256, 16\], got \[256, 15\]",
        ),
        (
            lambda t: t.update({f"{Q}.weight": torch.zeros(256, 128)}),
            {},
            f"{Q}.weight must be uint8, got torch.float32",
        ),
        (
            lambda t: t.update({f"{Q}.weight_scale_2": torch.tensor(float("nan"))}),
            {},
            "must be finite and positive, got nan",
        ),
        (
            lambda t: t.update({"model.extra.weight_scale": torch.ones(1)}),
            {},
            "no parameter of the model takes: model.extra",
        ),
        (
            lambda t: t.update({f"{Q}.bias": torch.zeros(256)}),
            {},
            f"no parameter of the model takes: {Q}.bias",
        ),
        (
            lambda t: None,
            {"exclude_modules": ["lm_head", Q]},
            f"{Q}.weight must be float64, float32, .*, got torch.uint8",
        ),
        (
            lambda t: None,
            {"quant_algo": "MXFP4", "group_size": 32},
            r"layers.0.self_attn.q_proj.weight_scale must be uint8, got torch.float8_e4m3fn",
        ),
    ],
)
def test_faults_are_named(
    change: Any, config: dict[str, Any], says: str, nvfp4: Path, make: Callable[..., LLM], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=says):
        make(changed(nvfp4, tmp_path / "out", change, **config))


def test_configurations_that_are_not_read(nvfp4: Path, make: Callable[..., LLM], tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"config.json: quantization_config: quant_algo NVFP4_SVD is not read; known: NVFP4"
    ):
        make(changed(nvfp4, tmp_path / "a", lambda t: None, quant_algo="NVFP4_SVD"))
    with pytest.raises(ConfigError, match="'exl2' is not supported; known: awq, compressed-tensors"):
        make(changed(nvfp4, tmp_path / "b", lambda t: None, quant_method="exl2"))


def test_the_configuration_beside(nvfp4: Path, make: Callable[..., LLM], tmp_path: Path) -> None:
    """hf_quant_config.json of ModelOpt is read where config.json has no entry."""
    out = changed(nvfp4, tmp_path / "out", lambda t: None)
    data = json.loads((out / "config.json").read_text())
    quantization = data.pop("quantization_config")
    (out / "config.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="uint8"):
        make(out)
    (out / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": quantization}))
    ids = oracle.window(0)[:9]
    assert torch.equal(window_logits(make(out).engine, ids), window_logits(make(nvfp4).engine, ids))


def test_a_bias_that_is_not_zero(make: Callable[..., LLM], tmp_path: Path) -> None:
    directory, _ = producers.convert(LLAMA, tmp_path, *producers.gptq(False))
    out = changed(directory, tmp_path / "out", lambda t: t[f"{Q}.bias"].__setitem__(3, 1.0))
    with pytest.raises(CheckpointError, match=f"{Q}.bias is not 0, and the model has no such bias"):
        make(out)


def test_experts_that_differ(make: Callable[..., LLM], tmp_path: Path) -> None:
    """Experts form one tensor: a different scheme for one of them is an error, and weights in floating point
    are the alternative."""
    config, produce = by_compressed_tensors(
        ([r"re:.*experts\.3\.down_proj"], "float-quantized", FP8), (["Linear"], "pack-quantized", INT4)
    )
    directory, plain = producers.convert(DEEPSEEK, tmp_path, config, produce)
    with pytest.raises(
        CheckpointError, match=r"the experts of layers\.1\.experts\.down differ: .*schemes differ"
    ):
        make(directory)
    ids = oracle.window(0)[:16]
    assert torch.equal(
        window_logits(make(directory, quant="fp32").engine, ids), window_logits(make(plain).engine, ids)
    )


def test_a_doubled_scale_is_seen(nvfp4: Path, make: Callable[..., LLM], tmp_path: Path) -> None:
    """Planted fault: one global scale of one part of a fused matrix is doubled."""
    name = "model.layers.3.mlp.up_proj.weight_scale_2"
    out = changed(nvfp4, tmp_path / "out", lambda t: t.update({name: t[name] * 2}))
    ids = oracle.window(0)[:32]
    right, wrong = (window_logits(make(p).engine, ids) for p in (nvfp4, out))
    assert float((right - wrong).abs().max() / right.abs().max()) > 1e-2


def test_a_quantized_embedding_is_dequantized(make: Callable[..., LLM], tmp_path: Path) -> None:
    """The model keeps its embedding in floating point, which GPTQ with lm_head and GGUF store quantized."""
    directory, plain = producers.convert(LLAMA, tmp_path, *producers.gptq(False))
    q = quantize(load_file(plain / "model.safetensors")["model.embed_tokens.weight"], "int8_ch")
    name = "model.embed_tokens"
    words = q.codes.t().reshape(-1, 4, q.n).to(torch.int64)
    packed = sum(words[:, i] << (8 * i) for i in range(4))
    signed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)

    def change(t: dict[str, torch.Tensor]) -> None:
        del t[f"{name}.weight"]
        zeros = torch.full((1, q.n // 4), 0x7F7F7F7F, dtype=torch.int32)
        t.update(
            {
                f"{name}.qweight": signed.contiguous(),
                f"{name}.qzeros": zeros,
                f"{name}.scales": q.scales.t().contiguous(),
            }
        )

    rule = {f"+:{name}": {"bits": 8, "group_size": -1, "sym": True}}
    out = changed(directory, tmp_path / "out", change, dynamic=rule)
    embedding = make(out).model.embedding  # type: ignore[attr-defined]
    assert torch.equal(embedding(torch.arange(q.n)), q.dequantize())


@proves("GGUF", "llama", "LlamaForCausalLM")
def test_a_gguf_file(make: Callable[..., LLM], tmp_path: Path) -> None:
    """q and k have one type, v another, the embedding a third, as in the mixtures of llama.cpp."""
    pytest.importorskip("gguf")
    kinds = {"v_proj": "Q8_0", "_proj": "Q4_1", "embed_tokens": "Q5_1"}
    path, plain = producers.gguf_file(LLAMA, tmp_path, kinds)
    llm, ids = make(path, activations="float"), oracle.window(0)[:48]
    expected = oracle.logits(oracle.load(plain), ids)
    assert float((window_logits(llm.engine, ids) - expected).abs().max() / expected.abs().max()) < 2e-4
    assert llm.config.eos_ids == (1,) and llm.config.head_dim == 64
    with pytest.raises(UsageError, match="no tokenizer.json"):
        llm.generate("The")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        make(path)
