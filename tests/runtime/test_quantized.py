"""Quantized models equal transformers with the same weights dequantized; and the directories that quantize
writes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from gristmill.kernel_registry.scheme import ALL_WEIGHT_SCHEMES, QuantScheme
from gristmill.quant import quantize
from gristmill.quant.writing.checkpoint import write_quantized
from gristmill.runtime.errors import CheckpointError, ConfigError, UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.loader.config import load_config
from gristmill.runtime.models import model_table
from gristmill.tools.evaluate import evaluate, window_logits, window_losses
from tests.runtime import kernel_sets, oracle
from tests.runtime.oracle import ARCHITECTURES, DEEPSEEK, LLAMA, MODELS, NAMES
from tests.runtime.proofs import proves
from tests.runtime.test_logits import LIMIT

SCHEMES = [name for name in ALL_WEIGHT_SCHEMES if not QuantScheme.parse(name).is_dense]
IN_CI = ((LLAMA, "int4_g128"), (DEEPSEEK, "nvfp4"))
LINEAR = re.compile(r"model\.layers\.\d+\..*(proj|proj_with_mqa)\.weight")


def dequantized(name: str, scheme: str, folder: Path) -> Path:
    """Writes a copy of an example model in float32 whose linear and expert weights are quantized and
    dequantized."""
    from safetensors.torch import save_file

    out = folder / f"{name}-{scheme}"
    out.mkdir()
    tensors = {}
    for file in sorted((MODELS / name).glob("*.safetensors")):
        with safe_open(file, "pt") as source:
            for key in source.keys():  # noqa: SIM118
                tensor = source.get_tensor(key)
                values = quantize(tensor, scheme).dequantize() if LINEAR.fullmatch(key) else tensor.float()
                tensors[key] = values.contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for extra in ("config.json", "generation_config.json"):
        (out / extra).write_bytes((MODELS / name / extra).read_bytes())
    return out


@pytest.fixture(scope="module")
def their_losses(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], torch.Tensor]:
    """transformers' losses [4, 511] on four windows with an example model's weights dequantized; each
    computed once."""

    @cache
    def get(name: str, scheme: str) -> torch.Tensor:
        folder = dequantized(name, scheme, tmp_path_factory.mktemp("dequantized"))
        model = oracle.load(folder)
        actual = torch.stack([oracle.losses(model, oracle.window(index)) for index in range(4)])
        shutil.rmtree(folder)
        return actual

    return get


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], Path]]:
    """An example model written by `write_quantized`; each is written once and removed with the module's
    tests."""
    folder = tmp_path_factory.mktemp("written")

    @cache
    def get(name: str, scheme: str) -> Path:
        out = folder / f"{name}-{scheme}"
        write_quantized(
            MODELS / name, out, model_table(load_config(MODELS / name)), QuantScheme.parse(scheme)
        )
        return out

    yield get
    shutil.rmtree(folder)


def loss(llm: LLM, windows: int) -> float:
    return evaluate(llm.engine, oracle.eval_tokens(), 512, windows).loss


@pytest.mark.parametrize(("name", "scheme"), IN_CI)
def test_loss_is_that_of_the_dequantized_weights(
    name: str, scheme: str, make: Callable[..., LLM], their_losses: Callable[[str, str], torch.Tensor]
) -> None:
    assert loss(make(name, quant=scheme), 1) == pytest.approx(
        float(their_losses(name, scheme)[0].mean()), abs=1e-4
    )


@proves("quantized", "every scheme at load", ARCHITECTURES)
@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", NAMES)
def test_loss_of_every_scheme(
    name: str, scheme: str, make: Callable[..., LLM], their_losses: Callable[[str, str], torch.Tensor]
) -> None:
    """The tolerance is tight in float32, where only sums are rounded; 0.003 nats in bf16."""
    expected = float(their_losses(name, scheme).mean())
    assert loss(make(name, quant=scheme), 4) == pytest.approx(expected, abs=3e-4)
    assert loss(make(name, quant=scheme, dtype="bf16"), 4) == pytest.approx(expected, abs=3e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kernel_set", kernel_sets.FAST)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", NAMES)
def test_every_scheme_in_every_way(
    name: str,
    scheme: str,
    kernel_set: str,
    make_strict: Callable[..., LLM],
    written: Callable[[str, str], Path],
    their_losses: Callable[[str, str], torch.Tensor],
) -> None:
    """In float32, each of 127 losses; in bf16, 0.003 nats over four windows."""
    expected = their_losses(name, scheme)
    exact = make_strict(written(name, scheme), kernel_set)
    assert (
        float((window_losses(exact.engine, oracle.window(0)[:128]) - expected[0, :127]).abs().max()) <= 2e-3
    )
    kernel_sets.check(exact, kernel_set)
    rounded = make_strict(written(name, scheme), kernel_set, dtype="bf16")
    assert loss(rounded, 4) == pytest.approx(float(expected.mean()), abs=3e-3)
    kernel_sets.check(rounded, kernel_set)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4_g128", "fp8_block", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_a_short_prompt_by_triton(
    name: str, scheme: str, make_strict: Callable[..., LLM], tmp_path: Path
) -> None:
    """In the interpreter: three ids."""
    llm, ids = make_strict(name, "triton", quant=scheme), oracle.window(0)[:3]
    expected = oracle.logits(oracle.load(dequantized(name, scheme, tmp_path)), ids)
    assert float((window_logits(llm.engine, ids) - expected).abs().max()) <= LIMIT
    kernel_sets.check(llm, "triton")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8_block.fp8_g128", "int8_ch.int8_token"])
def test_quantized_activations_cost_little(scheme: str, make: Callable[..., LLM]) -> None:
    plain = evaluate(make(LLAMA).engine, oracle.eval_tokens(), 512, 2).loss
    loss_of_activations = evaluate(
        make(LLAMA, quant=scheme, dtype="bf16").engine, oracle.eval_tokens(), 512, 2
    ).loss
    assert loss_of_activations == pytest.approx(plain, abs=0.03)


def test_a_doubled_block_scale_is_seen(
    make: Callable[..., LLM], their_losses: Callable[[str, str], torch.Tensor]
) -> None:
    """Planted fault: one scale of one weight is doubled; the tight comparison of losses must notice."""
    llm, expected = make(LLAMA, quant="int4_g128"), float(their_losses(LLAMA, "int4_g128")[0].mean())
    packed = llm.model.layers[0].mlp.down.weight  # type: ignore[attr-defined]
    scales = next(t for t in packed.tensors() if t.dtype == torch.bfloat16 and t.numel())
    scales.view(-1)[:16] *= 2
    assert abs(loss(llm, 1) - expected) > 3e-4


@pytest.mark.parametrize(
    ("name", "scheme"), [(LLAMA, "nvfp4"), (DEEPSEEK, "int4_g64_zp"), (DEEPSEEK, "mxfp4")]
)
def test_a_written_directory_reads_back_the_same(
    name: str, scheme: str, make: Callable[..., LLM], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    report = write_quantized(
        MODELS / name, out, model_table(load_config(MODELS / name)), QuantScheme.parse(scheme)
    )
    assert json.loads((out / "config.json").read_text())["quantization_config"] == {
        "quant_method": "gristmill",
        "version": 1,
        "scheme": scheme,
    }
    assert report["bytes_after"] < 0.7 * report["bytes_before"]
    ids = oracle.window(0)[:65]
    stored, rounded = make(out), make(name, quant=scheme)
    assert torch.equal(window_logits(stored.engine, ids), window_logits(rounded.engine, ids))
    assert stored.weight_bytes == rounded.weight_bytes
    assert stored.generate(["The"])[0].text == rounded.generate(["The"])[0].text


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", NAMES)
def test_every_written_scheme_reads_back_the_same(
    name: str, scheme: str, make: Callable[..., LLM], written: Callable[[str, str], Path]
) -> None:
    stored, rounded = make(written(name, scheme)), make(name, quant=scheme)
    ids = oracle.window(0)[:33]
    assert torch.equal(window_logits(stored.engine, ids), window_logits(rounded.engine, ids))


def test_a_directory_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    table, scheme = model_table(load_config(MODELS / LLAMA)), QuantScheme.parse("nvfp4")
    listings: list[list[str]] = []

    def interrupted(done: int, total: int) -> None:
        listings.append(sorted(path.name for path in tmp_path.iterdir()))
        if done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_quantized(MODELS / LLAMA, tmp_path / "out", table, scheme, interrupted)
    assert listings and all(names == [".out.unfinished"] for names in listings)
    assert [path.name for path in tmp_path.iterdir()] == [".out.unfinished"]  # left for a later run to resume
    (tmp_path / "out").mkdir()  # an empty folder may exist
    write_quantized(MODELS / LLAMA, tmp_path / "out", table, scheme)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(UsageError, match=rf"{tmp_path}/out exists and is not an empty folder"):
        write_quantized(MODELS / LLAMA, tmp_path / "out", table, scheme)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}


def test_a_directory_that_came_to_be_meanwhile_is_left_alone(tmp_path: Path) -> None:
    def intrude(done: int, total: int) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "theirs").touch()

    with pytest.raises(UsageError, match="came to be while it was written"):
        write_quantized(
            MODELS / LLAMA,
            tmp_path / "out",
            model_table(load_config(MODELS / LLAMA)),
            QuantScheme.parse("nvfp4"),
            intrude,
        )
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]


def test_pickled_weights_are_not_copied(tmp_path: Path) -> None:
    source = Path(shutil.copytree(MODELS / LLAMA, tmp_path / "source"))
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", "notes.txt"):
        (source / name).write_text("{}")
    write_quantized(source, tmp_path / "out", model_table(load_config(source)), QuantScheme.parse("nvfp4"))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "notes.txt",
        "tokenizer.json",
        "training.json",
    }


def test_shards_of_a_large_model(
    make: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gristmill.quant.writing import checkpoint as quantized

    monkeypatch.setattr(quantized, "SHARD_BYTES", 1 << 20)
    write_quantized(
        MODELS / LLAMA,
        tmp_path / "out",
        model_table(load_config(MODELS / LLAMA)),
        QuantScheme.parse("fp8_block"),
    )
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    ids = oracle.window(0)[:9]
    assert torch.equal(
        window_logits(make(tmp_path / "out").engine, ids),
        window_logits(make(LLAMA, quant="fp8_block").engine, ids),
    )


def test_fused_parts_keep_their_own_global_scales(shared: Callable[..., LLM]) -> None:
    """q, k and v share a matrix but not a multiplier: the rows of each part equal those quantized separately."""
    from gristmill.quant.checkpoints.safetensors import SafetensorsCheckpoint
    from gristmill.quant.checkpoints.weights import Weights

    config = load_config(MODELS / LLAMA)
    weights = Weights(
        SafetensorsCheckpoint(MODELS / LLAMA),
        model_table(config),
        torch.float32,
        torch.device("cpu"),
        QuantScheme.parse("nvfp4"),
    )
    fused = weights.linear("layers.0.qkv")
    assert fused.segments == (0, 256, 384)
    source = SafetensorsCheckpoint(MODELS / LLAMA)
    for part, start in zip("qkv", fused.segments, strict=True):
        separate = quantize(source.read(f"model.layers.0.self_attn.{part}_proj.weight"), "nvfp4")
        assert torch.equal(separate.dequantize(), fused.dequantize()[start : start + separate.n])
    assert len({float(s) for s in fused.global_scale}) == 3


def test_refusals(tmp_path: Path, make: Callable[..., LLM]) -> None:
    table = model_table(load_config(MODELS / LLAMA))
    with pytest.raises(UsageError, match="bf16 is not a quantized scheme"):
        write_quantized(MODELS / LLAMA, tmp_path / "a", table, QuantScheme.parse("bf16"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(UsageError, match="not an empty folder"):
        write_quantized(MODELS / LLAMA, tmp_path / "full", table, QuantScheme.parse("nvfp4"))
    out = tmp_path / "out"
    write_quantized(MODELS / LLAMA, out, table, QuantScheme.parse("nvfp4"))
    with pytest.raises(UsageError, match="quantized already"):
        write_quantized(out, tmp_path / "again", table, QuantScheme.parse("nvfp4"))
    with pytest.raises(UsageError, match="quantized to nvfp4 already"):
        make(out, quant="mxfp4")
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["scheme"] = "int4_g128"
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"self_attn\.q_proj"):
        make(out)
    config["quantization_config"] = {"quant_method": "bitsandbytes", "bits": 4}
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="'bitsandbytes' is not supported; known: awq, .*gristmill"):
        make(out)
