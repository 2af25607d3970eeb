"""compressed-tensors: what the package's own compressors write is read as the same codes, scales and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import QuantTensor, quantize
from gristmill.quant.formats import FormatError, Tensors, open_format, open_writer
from gristmill.quant.formats.compressed_tensors import CompressedTensors
from tests.quant.oracle import act_order, weight

pytest.importorskip("compressed_tensors")
NAME = "model.layers.3.mlp.up_proj"


def outside(w: torch.Tensor, form: str, args: dict[str, Any], inputs: dict[str, Any] | None = None) -> Any:
    """Returns (tensors by name, configuration, their values in float32 as the package dequantizes them)."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    weights = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs, format=form)
    state: dict[str, torch.Tensor] = {"weight": w}
    if weights.strategy == "block":
        n, k = w.shape
        tiles = (
            torch.nn.functional.pad(w, (0, -k % 128, 0, -n % 128))
            .unflatten(1, (-1, 128))
            .unflatten(0, (-1, 128))
        )
        low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
    elif weights.strategy == "tensor":
        low, high = w.amin().view(1), w.amax().view(1)
    elif weights.strategy == "channel":
        low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    else:
        groups = w.unflatten(1, (-1, weights.group_size))
        low, high = groups.amin(2), groups.amax(2)
    if form.startswith("nvfp4"):
        state["weight_global_scale"] = generate_gparam(w.amin(), w.amax()).view(1)
    scale, zero = calculate_qparams(low, high, weights, global_scale=state.get("weight_global_scale"))
    state["weight_scale"] = scale
    if not weights.symmetric:
        state["weight_zero_point"] = zero
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(dict(state), scheme)
    upcast = {
        k: v.float() if k == "weight_scale" and v.dtype in (torch.float16, torch.bfloat16) else v
        for k, v in stored.items()
    }
    values = compressor.decompress(upcast, scheme)["weight"].float()
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
    }
    return {f"{NAME}.{k}": v for k, v in stored.items()}, config, values


def read(tensors: dict[str, torch.Tensor], config: dict[str, Any], shape: tuple[int, ...]) -> Any:
    read_back = CompressedTensors(config).read(Tensors(tensors), NAME, shape)
    assert read_back is not None and set(read_back.names) == set(tensors)
    return read_back


def integers(bits: int, strategy: str, symmetric: bool) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "int",
        "strategy": strategy,
        "symmetric": symmetric,
        "group_size": 32 if strategy == "group" else None,
    }


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("strategy", ["group", "channel"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pack_quantized(bits: int, strategy: str, symmetric: bool, dtype: torch.dtype) -> None:
    w = weight(37, 96 if strategy == "group" else 50).to(dtype)
    tensors, config, values = outside(w, "pack-quantized", integers(bits, strategy, symmetric))
    read_back = read(tensors, config, tuple(w.shape))
    assert read_back.weight.scheme == QuantScheme.integer(
        bits, 32 if strategy == "group" else None, zero_points=not symmetric
    )
    assert torch.equal(read_back.weight.dequantize(), values)
    assert torch.equal(read_back.weight.scales, tensors[f"{NAME}.weight_scale"])


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
@pytest.mark.parametrize("symmetric", [True, False])
def test_pack_quantized_with_padding_before_2026(bits: int, symmetric: bool) -> None:
    """Widths that do not divide 32 had 32 // bits codes per word. The test makes the words by plain
    arithmetic."""
    n, k, each = 10, 64, 32 // bits
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (n, k), generator=generator)
    zeros = torch.randint(0, 1 << bits, (n, 2), generator=generator)

    def words(rows: torch.Tensor) -> torch.Tensor:
        out = []
        for row in rows.tolist():
            row = row + [0] * (-len(row) % each)
            packed = [
                sum(v << (bits * i) for i, v in enumerate(row[j : j + each]))
                for j in range(0, len(row), each)
            ]
            out.append([v - (1 << 32) if v >= 1 << 31 else v for v in packed])
        return torch.tensor(out, dtype=torch.int32)

    scale = torch.rand(n, 2, generator=generator) + 0.1
    tensors = {
        f"{NAME}.weight_packed": words(codes),
        f"{NAME}.weight_scale": scale,
        f"{NAME}.weight_shape": torch.tensor([n, k]),
    }
    if not symmetric:
        tensors[f"{NAME}.weight_zero_point"] = words(zeros.t()).t().contiguous()
    group = {"targets": ["Linear"], "weights": integers(bits, "group", symmetric)}
    read_back = read(tensors, {"format": "pack-quantized", "config_groups": {"a": group}}, (n, k))
    zero = torch.full_like(zeros, 1 << (bits - 1)) if symmetric else zeros
    expected = (codes - zero.repeat_interleave(32, 1)).float() * scale.repeat_interleave(32, 1)
    assert torch.equal(read_back.weight.dequantize(), expected)


def test_act_order() -> None:
    """weight_g_idx gives the group of each column. -1 everywhere, or groups in order, mean no act-order."""
    w = weight(8, 96)
    tensors, config, _ = outside(w, "pack-quantized", integers(4, "group", True))
    plain = read(tensors, config, (8, 96)).weight
    shuffled = (torch.arange(96) // 32)[torch.randperm(96, generator=torch.Generator().manual_seed(0))].to(
        torch.int32
    )
    for g_idx, same in ((torch.full((96,), -1), True), (torch.arange(96) // 32, True), (shuffled, False)):
        read_back = read(tensors | {f"{NAME}.weight_g_idx": g_idx.to(torch.int32)}, config, (8, 96)).weight
        assert read_back.identical(plain) == same
    assert torch.equal(
        read_back.dequantize(),
        (read_back.unpacked().float() - 8) * read_back.scales.float()[:, shuffled.long()],
    )
    with pytest.raises(FormatError, match=r"groups 0\.\.2, got 0\.\.7"):
        read(tensors | {f"{NAME}.weight_g_idx": torch.arange(96) // 12}, config, (8, 96))


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
@pytest.mark.parametrize("static", [True, False])
def test_float_quantized(strategy: str, static: bool) -> None:
    w = weight(200, 300)
    args = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    if strategy == "block":
        args["block_structure"] = [128, 128]
    inputs = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor" if static else "token",
        "dynamic": not static,
    }
    tensors, config, values = outside(w, "float-quantized", args, inputs)
    if static:
        tensors[f"{NAME}.input_scale"] = torch.tensor([0.25], dtype=torch.bfloat16)
    read_back = read(tensors, config, (200, 300))
    assert (
        str(read_back.weight.scheme) == {"tensor": "fp8", "channel": "fp8_ch", "block": "fp8_block"}[strategy]
    )
    assert torch.equal(read_back.weight.dequantize(), values)
    assert read_back.activation == ("fp8" if static else "fp8_token")
    assert (read_back.input_scale is not None) == static and (
        not static or float(read_back.input_scale) == 0.25
    )
    if static:
        del tensors[f"{NAME}.input_scale"]
        with pytest.raises(FormatError, match="static activation scales need tensor .*input_scale"):
            read(tensors, config, (200, 300))


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int_quantized(strategy: str, symmetric: bool) -> None:
    w = weight(20, 96)
    args = {"num_bits": 8, "type": "int", "strategy": strategy, "symmetric": symmetric}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    tensors, config, values = outside(w, "int-quantized", args, inputs)
    read_back = read(tensors, config, (20, 96))
    assert (
        str(read_back.weight.scheme) == ("int8_ch" if symmetric else "int8_ch_zp")
        and read_back.activation == "int8_token"
    )
    assert torch.equal(read_back.weight.dequantize(), values)


def in_float32(tensors: dict[str, torch.Tensor], args: dict[str, Any]) -> torch.Tensor:
    """Returns the package's own dequantization of NVFP4, but not in bfloat16 as its compressor does it."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    packed = tensors[f"{NAME}.weight_packed"]
    codes = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], torch.float32)
    return dequantize(
        codes,
        tensors[f"{NAME}.weight_scale"].float(),
        args=QuantizationArgs(**args),
        global_scale=tensors[f"{NAME}.weight_global_scale"],
        dtype=torch.float32,
    )


def test_nvfp4_global_is_a_divisor() -> None:
    w = weight(20, 96)
    args = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    tensors, config, _ = outside(w, "nvfp4-pack-quantized", args)
    values = in_float32(tensors, config["config_groups"]["group_0"]["weights"])
    read_back = read(tensors, config, (20, 96)).weight
    assert torch.equal(read_back.codes, tensors[f"{NAME}.weight_packed"])
    assert torch.equal(read_back.scales.view(torch.uint8), tensors[f"{NAME}.weight_scale"].view(torch.uint8))
    # scale / divisor and scale * (1 / divisor) differ by at most the last bit
    assert torch.allclose(read_back.dequantize(), values, rtol=2.4e-7, atol=0)
    # planted fault: the divisor is read as a multiplier, as in ModelOpt
    wrong = QuantTensor(
        read_back.codes,
        read_back.scales,
        read_back.shape,
        "nvfp4",
        global_scale=tensors[f"{NAME}.weight_global_scale"],
    )
    assert not torch.allclose(wrong.dequantize(), values, rtol=0.5, atol=0)
    config["config_groups"]["group_0"]["input_activations"] = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "dynamic": "local",
    }
    with_input_scale = read(tensors | {f"{NAME}.input_global_scale": torch.tensor([8.0])}, config, (20, 96))
    assert float(with_input_scale.input_scale) == 0.125 and with_input_scale.activation == "nvfp4"


@pytest.mark.parametrize(("form", "bits"), [("mxfp4-pack-quantized", 4), ("mxfp8-quantized", 8)])
def test_mx(form: str, bits: int) -> None:
    w = weight(20, 96)
    args = {
        "num_bits": bits,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "scale_dtype": "torch.uint8",
    }
    tensors, config, values = outside(w, form, args)
    read_back = read(tensors, config, (20, 96)).weight
    assert str(read_back.scheme) == f"mxfp{bits}"
    assert torch.equal(read_back.scales, tensors[f"{NAME}.weight_scale"])
    assert torch.equal(read_back.dequantize(), values)


def test_experts_are_packed_matrix_by_matrix() -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    q = quantize(weight(16, 64, 0, (3,)), "int4_g32_zp")
    signed, zeros = (t.to(torch.int16).sub(8).to(torch.int8) for t in (q.unpacked(), q.zero))
    tensors = {
        f"{NAME}.weight_packed": pack_to_int32(signed, 4),
        f"{NAME}.weight_scale": q.scales,
        f"{NAME}.weight_zero_point": pack_to_int32(zeros, 4, packed_dim=0),
    }
    group = {"targets": ["Linear"], "weights": integers(4, "group", False)}
    read_back = read(tensors, {"format": "pack-quantized", "config_groups": {"a": group}}, (3, 16, 64))
    assert read_back.weight.identical(q)


def rules(groups: dict[str, Any], ignore: tuple[str, ...] = ()) -> CompressedTensors:
    config_groups = {
        name: {"targets": targets, "weights": integers(bits, "channel", True)}
        for name, (targets, bits) in groups.items()
    }
    return CompressedTensors(
        {"format": "pack-quantized", "config_groups": config_groups, "ignore": list(ignore)}
    )


def test_a_name_goes_before_an_expression_and_that_before_the_class() -> None:
    parsed_rules = rules(
        {
            "c": (["Linear"], 4),
            "b": ([r"re:.*\.mlp\..*"], 8),
            "a": (["model.layers.0.mlp.down_proj", "model.layers.1.mlp.gate"], 3),
        },
        ("lm_head", r"re:.*layers\.9\..*"),
    )

    def bits(module: str) -> int | None:
        rule = parsed_rules.rule(module)
        return None if rule is None else rule.scheme.bits

    assert bits("model.layers.0.self_attn.q_proj") == 4
    assert bits("model.layers.0.mlp.up_proj") == 8
    assert bits("model.layers.0.mlp.down_proj") == 3
    assert bits("model.layers.9.mlp.down_proj") is None and bits("lm_head") is None
    assert bits("model.layers.1.mlp.gate_proj") == 8  # patterns match whole names


def test_matching_is_that_of_the_package() -> None:
    match = pytest.importorskip("compressed_tensors.utils.match")
    modules = ["lm_head", "model.layers.0.mlp.gate", "model.layers.10.mlp.up_proj", "visual.blocks.0.q"]
    for target in ["lm_head", "re:.*mlp.*", r"re:model\.layers\.1\..*", "re:layers", "visual", "Linear"]:
        parsed_rules = rules({"a": ([target], 4)})
        for module in modules:
            expected = match.is_match(module, torch.nn.Linear(1, 1), target)
            assert (parsed_rules.rule(module) is not None) == expected, (target, module)


def test_groups_that_disagree() -> None:
    parsed_rules = rules({"a": (["re:.*mlp.*"], 4), "b": (["re:.*up.*"], 8)})
    with pytest.raises(FormatError, match=r"mlp\.up: config groups a, b match it"):
        parsed_rules.rule("mlp.up")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "marlin-24"}, "'marlin-24' is not read; known: pack-quantized"),
        ({"format": "mxfp6-pack-quantized"}, "mxfp6-pack-quantized"),
        ({"config_groups": {"W4A16": ["Linear"]}}, "preset schemes"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        (
            {"config_groups": {"a": {"targets": ["re:(("], "weights": integers(4, "channel", True)}}},
            "regular expression",
        ),
        ({"ignore": ["re:(a+)+b"]}, r"ignore: matching .* could take forever"),
        (
            {"config_groups": {"a": {"targets": ["Linear"], "weights": integers(9, "channel", True)}}},
            "9-bit int",
        ),
        (
            {
                "config_groups": {
                    "a": {
                        "targets": ["Linear"],
                        "weights": {"type": "float", "strategy": "group", "group_size": 64},
                    }
                }
            },
            "8-bit float weights",
        ),
        ({"config_groups": None}, "'config_groups' is missing"),
        ({"ignore": [1]}, "list of strings"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    config = {
        "format": "pack-quantized",
        "config_groups": {"a": {"targets": ["Linear"], "weights": integers(4, "channel", True)}},
    }
    with pytest.raises(FormatError, match=message.replace("(", r"\(")):
        CompressedTensors(config | change)


def test_tensors_that_do_not_fit() -> None:
    w = weight(16, 64)
    tensors, config, _ = outside(w, "pack-quantized", integers(4, "group", False))
    cases = [
        (f"{NAME}.weight_packed", None, "needs tensor .*weight_packed; found .*weight_scale"),
        (f"{NAME}.weight_zero_point", None, "weight_zero_point"),
        (
            f"{NAME}.weight_packed",
            torch.zeros(16, 9, dtype=torch.int32),
            r"must have shape \[16, 8\], got \[16, 9\]",
        ),
        (f"{NAME}.weight_packed", torch.zeros(16, 8), "int32, got torch.float32"),
        (f"{NAME}.weight_scale", torch.zeros(16, 3), r"shape \[16, 2\], got \[16, 3\]"),
        (f"{NAME}.weight_scale", torch.full((16, 2), torch.nan), "finite"),
        (f"{NAME}.weight_shape", torch.tensor([64, 16]), r"says \[64, 16\]"),
    ]
    for name, value, message in cases:
        changed = {k: v for k, v in tensors.items() if k != name} | ({} if value is None else {name: value})
        with pytest.raises(FormatError, match=message):
            CompressedTensors(config).read(Tensors(changed), NAME, (16, 64))


@pytest.mark.parametrize("actorder", ["group", "dynamic", True])
def test_an_order_without_its_index_is_refused(actorder: object) -> None:
    """Without weight_g_idx the columns would be read with other groups."""
    writer = open_writer("compressed-tensors", "int4_g32")
    q = quantize(weight(64, 256), "int4_g32", g_idx=act_order("int4_g32", 256))
    tensors, config = {f"m.{suffix}": t for suffix, t in writer.tensors(q).items()}, writer.config([])
    config["config_groups"]["group_0"]["weights"]["actorder"] = actorder
    read_back = open_format(config).read(Tensors(tensors), "m", (64, 256))
    assert read_back is not None and torch.equal(read_back.weight.dequantize(), q.dequantize())
    del tensors["m.weight_g_idx"]
    with pytest.raises(FormatError, match="group_0 has actorder by groups, and there is no m.weight_g_idx"):
        open_format(config).read(Tensors(tensors), "m", (64, 256))
    for static in ("weight", None, False):  # groups stay in place
        config["config_groups"]["group_0"]["weights"]["actorder"] = static
        assert open_format(config).read(Tensors(tensors), "m", (64, 256)) is not None
