"""Every rank's share of every weight is that part of the whole weight, bit for bit, in every scheme and format; heads, experts and
vocabularies that ranks cannot share are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.scheme import ALL_WEIGHT_SCHEMES, QuantScheme
from gristmill.quant import QuantTensor, quantize
from gristmill.quant.checkpoints import shards as shares
from gristmill.quant.checkpoints.shards import Shard, ShardSpec, of_parts, shard_quantized
from gristmill.quant.checkpoints.table import Weight
from gristmill.quant.checkpoints.weights import Weights
from gristmill.quant.formats import open_format
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.errors import UsageError
from gristmill.runtime.layers.linear import Linear
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.loader.config import load_config, open_checkpoint
from gristmill.runtime.models import families, model_table
from gristmill.runtime.parallel.mesh import ALONE, Mesh, local_config
from tests.runtime import producers
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS

CPU = torch.device("cpu")
SCHEMES = ("fp32", "int4_g128", "int4_g32_zp", "int4_ch", "int8_ch", "fp8", "fp8_block", "mxfp4", "nvfp4")
"""One scheme per kind of scale: none, groups, groups with zero points, channels, one per tensor, blocks, E8M0, two levels."""


def read(weights: Weights, weight: Weight) -> tuple[Tensor, Tensor | None]:
    """Returns a parameter in float32 and its pre_scale."""
    if weight.kind != "linear":
        vocabulary = weight.target in ("embedding", "head")
        return (
            weights.vocabulary(weight.target).weight.dequantize()
            if vocabulary
            else weights.tensor(weight.target)
        ), None
    if weight.experts:
        return weights.linear(weight.target).dequantize(), None
    parts = weights.parts(weight.target)
    return torch.cat([part.weight.dequantize() for part in parts]), parts[0].pre_scale


def share(whole: Tensor, spec: ShardSpec | None, rank: Weights) -> Tensor:
    """Returns the part of a whole parameter that a rank is to have."""
    if spec is None:
        return whole
    index = torch.cat([torch.arange(first, last) for first, last in spec.ranges(rank.rank, rank.world)])
    return whole[:, index] if spec.dim == "columns" else whole[index]


def weights_of(folder: Path, mesh: Mesh, quant: str | None = None, head: str | None = None) -> Weights:
    config = load_config(folder)
    stored = None if config.quantization is None else open_format(config.quantization)
    scheme, head_scheme = (None if name is None else QuantScheme.parse(name) for name in (quant, head))
    source, place = open_checkpoint(folder), (mesh.rank, mesh.world)
    table = model_table(config).within(families()[config.architecture].base, source)
    return Weights(source, table, torch.float32, CPU, scheme, stored, head_scheme, *place)


def compare(
    folder: Path,
    worlds: tuple[int, ...],
    quant: str | None = None,
    head: str | None = None,
    layers: int | None = None,
) -> None:
    """Compares the shares of all ranks with the whole weights: of the first layers, or of the whole checkpoint."""
    alone = weights_of(folder, ALONE, quant, head)
    ranks = [weights_of(folder, Mesh(rank, world), quant, head) for world in worlds for rank in range(world)]
    for weight in alone.table.weights:
        layer = weight.target.split(".")[1:2]
        if layers is not None and layer and int(layer[0]) >= layers:
            continue
        whole, whole_scale = read(alone, weight)
        for rank in ranks:
            part, scale = read(rank, weight)
            assert torch.equal(part, share(whole, weight.shard, rank)), (weight.target, rank.rank)
            columns = weight.shard is not None and weight.shard.dim == "columns"
            if scale is not None and whole_scale is not None:
                expected = share(whole_scale[None], weight.shard, rank)[0] if columns else whole_scale
                assert torch.equal(scale, expected), weight.target
    if layers is None:
        for rank in ranks:
            rank.finish()


@pytest.mark.parametrize("quant", [None, "int4_g32_zp", "int8_ch", "fp8_block", "nvfp4"])
def test_shares_of_a_llama(quant: str | None) -> None:
    compare(MODELS / LLAMA, (2, 4), quant, None if quant in (None, "fp32") else "fp8_block", layers=1)


@pytest.mark.parametrize("quant", [None, "fp8_block"])
def test_shares_of_latent_attention_and_experts(quant: str | None) -> None:
    compare(MODELS / DEEPSEEK, (2,), quant, "int8_g128", layers=2)


@pytest.mark.parametrize("name", [LLAMA, DEEPSEEK])
def test_every_tensor_belongs_to_a_rank(name: str) -> None:
    compare(MODELS / name, (2,))


@pytest.mark.parametrize(
    "name", ["bert", "modernbert with biases", "distilbert", "mpnet", "modernbert classifier"]
)
def test_shares_of_encoders(name: str, tmp_path: Path) -> None:
    from tests.runtime.pooling.encoder_cases import build

    build(name, tmp_path)
    compare(tmp_path, (2,))
    compare(tmp_path, (2,), "int8_ch")


@pytest.mark.slow
@pytest.mark.parametrize("quant", ALL_WEIGHT_SCHEMES)
@pytest.mark.parametrize("name", [LLAMA, DEEPSEEK])
def test_shares_in_every_scheme(name: str, quant: str) -> None:
    compare(MODELS / name, (2, 4), quant)


FORMATS: dict[str, Callable[[], Any]] = {
    "gptq act-order": lambda: producers.gptq(True),
    "awq": producers.awq,
    "modelopt nvfp4 pre_quant_scale": lambda: producers.modelopt_nvfp4(("v_proj", "up_proj", "down_proj")),
}


@pytest.mark.parametrize("form", FORMATS)
def test_shares_of_other_formats(form: str, tmp_path: Path) -> None:
    folder, _ = producers.convert(LLAMA, tmp_path, *FORMATS[form]())
    compare(folder, (2, 4), layers=2)


@pytest.mark.parametrize("form", ["floats", "floats rounded", "mxfp4"])
def test_shares_of_interleaved_experts(form: str, tmp_path: Path) -> None:
    """gpt-oss: gate and up rows, and their biases, are stored in turn, and handed out with gate first, on every rank."""
    from gristmill.quant.writing.checkpoint import write_quantized
    from tests.runtime.test_models import build

    model, folder = build("gpt-oss", tmp_path), tmp_path
    if form == "mxfp4":
        folder = tmp_path / "out"
        table = model_table(load_config(tmp_path))
        write_quantized(tmp_path, folder, table, QuantScheme.parse("mxfp4"), form="mxfp4")
    quant = "int4_g32" if form == "floats rounded" else None
    compare(folder, (2, 4), quant)
    experts, weights = model.model.layers[0].mlp.experts, weights_of(folder, ALONE, quant)
    bias = experts.gate_up_proj_bias.detach()
    expected = torch.cat((bias[:, 0::2], bias[:, 1::2]), 1)
    assert torch.equal(weights.tensor("layers.0.experts.gate_up.bias"), expected)
    rows = experts.gate_up_proj.detach().transpose(1, 2)
    parted = QuantTensor.from_dense(torch.cat((rows[:, 0::2], rows[:, 1::2]), 1).contiguous())
    if form != "floats":
        parted = quantize(parted.dequantize(), "mxfp4" if form == "mxfp4" else "int4_g32")
    assert torch.equal(weights.linear("layers.0.experts.gate_up").dequantize(), parted.dequantize())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_of_shares_sum_to_the_product(scheme: str, policy: Policy) -> None:
    """By the kernels that are selected for the shares: columns cut at a group's end and inside it, rows inside a block."""
    torch.manual_seed(0)
    weight, x = quantize(torch.randn(96, 384) / 18, scheme), torch.randn(7, 384)
    plans = Plans(CPU, torch.float32, policy)
    expected = x @ weight.dequantize().T
    for cut in (128, 160):
        parts = [(0, cut), (cut, 384)]
        products = [
            Linear(plans, shard_quantized(weight, ((0, 96),), part))(x[:, slice(*part)]) for part in parts
        ]
        assert torch.allclose(products[0] + products[1], expected, atol=2e-5), cut
    rows = [Linear(plans, shard_quantized(weight, (part,)))(x) for part in ((0, 40), (40, 96))]
    assert torch.allclose(torch.cat(rows, 1), expected, atol=2e-5)


@pytest.mark.parametrize("kind", ["shard_floats", "shard_quantized"])
def test_planted_faults_are_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share that begins one row too late is another share."""
    real = getattr(shares, kind)

    def late(weight: Any, rows: Any, columns: Any = None) -> Any:
        (first, last), *others = rows
        shift = int(last < (weight.shape[0] if isinstance(weight, Tensor) else weight.n))
        return real(weight, ((first + shift, last + shift), *others), columns)

    monkeypatch.setattr(f"gristmill.quant.checkpoints.weights.{kind}", late)
    with pytest.raises(AssertionError):
        compare(MODELS / LLAMA, (2,), "fp8_block" if kind == "shard_quantized" else None, layers=1)


@pytest.mark.parametrize("world", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("length", [8, 257, 768, 4096, 29568])
def test_ranges_divide_a_length(length: int, world: int) -> None:
    ranges = [Shard(length).range(rank, world) for rank in range(world)]
    assert ranges[0][0] == 0 and ranges[-1][1] == length
    assert all(a[1] == b[0] and a[0] < a[1] for a, b in zip(ranges, ranges[1:], strict=False))
    if length >= 128 * world:
        assert all(first % 128 == 0 for first, _ in ranges), "no group of 128 is divided"


def test_groups_that_do_not_divide_are_shared_unevenly() -> None:
    """29,568 columns are 231 groups of 128: 116 and 115."""
    assert [b - a for a, b in (Shard(29568).range(rank, 2) for rank in range(2))] == [116 * 128, 115 * 128]


def test_kv_heads_are_replicated() -> None:
    heads = Shard(2 * 64, 2)
    assert [heads.range(rank, 4) for rank in range(4)] == [(0, 64), (0, 64), (64, 128), (64, 128)]
    with pytest.raises(UsageError, match="2 heads cannot be shared by 3 ranks"):
        heads.range(0, 3)


def test_pieces_of_one_fused_tensor() -> None:
    """Phi-3 stores q, k and v as one tensor."""
    spec = ShardSpec.head_rows(4, 2, 2, size=64)
    assert spec.ranges(1, 2) == [(128, 256), (320, 384), (448, 512)]
    assert of_parts(spec.ranges(1, 2), (512,)) == [[(128, 256), (320, 384), (448, 512)]]
    assert of_parts(spec.ranges(1, 2), (256, 128, 128)) == [[(128, 256)], [(64, 128)], [(64, 128)]]


def config(**changes: Any) -> ModelConfig:
    return replace(load_config(MODELS / LLAMA), **changes)


def test_sizes_that_ranks_cannot_share_are_refused() -> None:
    assert local_config(config(), Mesh(3, 4)).num_kv_heads == 1
    with pytest.raises(UsageError, match=r"tensor_parallel=3: 4 query heads and 2 KV heads .* can: 1, 2, 4$"):
        local_config(config(), Mesh(0, 3))
    with pytest.raises(UsageError, match=r"14 query heads and 2 KV heads .* can: 1, 2, 14$"):
        local_config(config(num_heads=14), Mesh(0, 4))
    with pytest.raises(UsageError, match="2 entries cannot be shared by 3 ranks; at most 2 can"):
        ShardSpec.experts(2).ranges(0, 3)
