"""gristmill.nn and quantize_module: values, state dicts, copies, torch.compile, refusals."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

import gristmill
from gristmill import nn, quantize
from gristmill.autotune.resolve import Resolver
from gristmill.quant import Tensors, open_format
from gristmill.quant.tensor import same_bits
from tests.runtime.oracle import LLAMA, MODELS, eval_tokens, load

SCHEMES = ("int4_g128", "int4_g32_zp", "int8_ch", "fp8", "fp8_block", "mxfp8", "mxfp4", "nvfp4", "bf16")


@pytest.fixture(autouse=True)
def unverified(policy_file, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels count as verified."""
    policy_file()
    monkeypatch.setattr(Resolver, "resolve", Resolver.select)


def float_layer(n: int = 48, k: int = 256, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    torch.manual_seed(n + k)
    return torch.nn.Linear(k, n).to(dtype)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


class Block(torch.nn.Module):
    """Two layers, of which one is excluded, and a matrix that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, 128)
        self.up = torch.nn.Linear(128, 256)
        self.down = torch.nn.Linear(256, 128, bias=False)
        self.lm_head = torch.nn.Linear(128, 64, bias=False)
        self.tied = torch.nn.Linear(128, 64, bias=False)
        self.tied.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.down(torch.nn.functional.silu(self.up(self.embed(ids))))
        return self.lm_head(x) + self.tied(x)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_linear_is_the_product_with_the_rounded_weight(scheme: str) -> None:
    layer = float_layer()
    quantized = nn.Linear.from_float(layer, scheme)
    rounded = quantize(layer.weight.detach(), scheme)
    assert quantized.weight().identical(rounded)
    for shape in ((256,), (1, 256), (2, 3, 256), (0, 256), (33, 256)):
        x = torch.randn(shape)
        close(quantized(x), torch.nn.functional.linear(x, rounded.dequantize(), layer.bias))
    assert (quantized.in_features, quantized.out_features) == (256, 48) and str(rounded.scheme) in str(
        quantized
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_state_dict_comes_back_bit_for_bit(scheme: str) -> None:
    first = nn.Linear.from_float(float_layer(), scheme)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    second = nn.Linear.from_float(float_layer(48, 256).requires_grad_(False), scheme)
    with torch.no_grad():
        second.set_weight(quantize(torch.randn(48, 256), scheme))
        second.bias.zero_()
    x = torch.randn(5, 256)
    assert not torch.equal(first(x), second(x))
    assert second.load_state_dict(stored) == ([], [])
    assert torch.equal(first(x), second(x)) and first.weight().identical(second.weight())


def test_linear_takes_any_strides() -> None:
    layer = nn.Linear.from_float(float_layer(), "int4_g128")
    rows = torch.randn(5, 3, 256)
    for x in (
        rows.transpose(0, 1),
        rows[:, :1].expand(5, 3, 256),
        rows.mT.contiguous().mT,
        rows[:, 0],
        rows[0].T.contiguous().T,
    ):
        assert not x.is_contiguous() and torch.equal(layer(x), layer(x.contiguous()))


@pytest.mark.parametrize("device_or_dtype", [torch.float64, "meta"])
def test_linear_stays_as_it_is_where_it_cannot_go(device_or_dtype: Any) -> None:
    layer, x = nn.Linear.from_float(float_layer(), "int4_g128"), torch.randn(2, 256)
    before = layer(x)
    with pytest.raises(ValueError, match="got torch.float64|the meta device"):
        layer.to(device_or_dtype)
    assert torch.equal(layer(x), before)
    with pytest.raises(ValueError, match="got torch.float64"):
        nn.Linear.from_float(float_layer(dtype=torch.float64), "int4_g128")


def test_its_keys_are_those_of_a_gristmill_directory() -> None:
    model = torch.nn.ModuleDict({"proj": nn.Linear.from_float(float_layer(), "int4_g128")})
    state = model.state_dict()
    assert set(state) == {"proj.codes", "proj.scales", "proj.bias"}
    format = open_format({"quant_method": "gristmill", "scheme": "int4_g128"})
    stored = format.read(Tensors(state), "proj", (48, 256))
    assert stored is not None and stored.weight.identical(model["proj"].weight())


def test_act_order_survives() -> None:
    order = (torch.randperm(256) // 128).int()
    weight = quantize(torch.randn(48, 256), "int4_g128", g_idx=order)
    layer = nn.Linear(weight, dtype=torch.float32)
    assert "g_idx" in layer.state_dict() and layer.weight().identical(weight)
    x = torch.randn(3, 256)
    close(layer(x), x @ weight.dequantize().T)
    other = nn.Linear(quantize(torch.randn(48, 256), "int4_g128"), dtype=torch.float32)
    other.load_state_dict(layer.state_dict())
    close(other(x), layer(x))


@pytest.mark.parametrize("change", ["missing", "scheme", "shape", "extra"])
def test_a_state_dict_that_does_not_fit(change: str) -> None:
    layer = nn.Linear.from_float(float_layer(), "int4_g128")
    before, state = layer.weight(), layer.state_dict()
    if change == "missing":
        del state["codes"]
    elif change == "scheme":
        state.update(nn.Linear.from_float(float_layer(), "int8_ch").state_dict())
    elif change == "shape":
        state.update(nn.Linear.from_float(float_layer(32), "int4_g128").state_dict())
    else:
        state["colour"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match="codes|colour"):
        layer.load_state_dict(state)
    if change != "extra":
        assert layer.weight().identical(before)


def test_a_new_weight_takes_the_place_of_the_old_in_memory() -> None:
    """Captured graphs read the weight at that address."""
    layer = nn.Linear.from_float(float_layer(), "int4_g128")
    places = [buffer.data_ptr() for buffer in layer.buffers()]
    other = quantize(torch.randn(48, 256), "int4_g128")
    layer.set_weight(other)
    assert [buffer.data_ptr() for buffer in layer.buffers()] == places and layer.weight().identical(other)
    with pytest.raises(ValueError, match=r"cannot hold QuantTensor\(int8_ch \[48, 256\]"):
        layer.set_weight(quantize(torch.randn(48, 256), "int8_ch"))


def test_copies_and_pickles() -> None:
    layer, x = nn.Linear.from_float(float_layer(), "int4_g128"), torch.randn(3, 256)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x)) and other.plan is layer.plan
        assert all(
            a.data_ptr() != b.data_ptr()
            for a, b in zip(other.buffers(), layer.buffers(), strict=True)
            if a.numel()
        )


def test_half_and_back_keep_the_codes() -> None:
    layer = nn.Linear.from_float(float_layer(), "nvfp4")
    before = layer.weight()
    layer.bfloat16()
    assert layer.dtype == layer.bias.dtype == torch.bfloat16 and layer.weight().identical(before)
    assert layer(torch.randn(2, 256).bfloat16()).dtype is torch.bfloat16
    table = nn.Embedding(before, dtype=torch.float32).half()
    assert table.weight().identical(before) and table(torch.tensor([1])).dtype is torch.float16


@pytest.mark.parametrize("scheme", SCHEMES)
def test_embedding_dequantizes_the_rows_it_looks_up(scheme: str) -> None:
    table = torch.nn.Embedding(300, 256)
    embedding = nn.Embedding.from_float(table, scheme)
    rows = quantize(table.weight.detach(), scheme).dequantize()
    for shape in ((), (7,), (2, 5), (0,)):
        ids = torch.randint(300, shape)
        assert torch.equal(embedding(ids), rows[ids])
    other = nn.Embedding.from_float(torch.nn.Embedding(300, 256), scheme)
    other.load_state_dict(embedding.state_dict())
    assert same_bits(other(ids), embedding(ids)) and other.weight().identical(embedding.weight())


@pytest.mark.parametrize("scheme", ["int8_ch", "bf16"])
def test_embedding_refuses_what_torch_refuses(scheme: str) -> None:
    embedding = nn.Embedding.from_float(torch.nn.Embedding(50, 64), scheme)
    for token in (-1, 50):
        with pytest.raises(IndexError, match="index 50 is out of bounds"):
            embedding(torch.tensor([0, token]))
    for dtype in (torch.bool, torch.uint8, torch.float32):
        with pytest.raises(TypeError, match=f"int64 or int32, got {dtype}"):
            embedding(torch.ones(50, dtype=dtype))
    with pytest.raises(ValueError, match="max_norm"):
        nn.Embedding.from_float(torch.nn.Embedding(50, 64, max_norm=0.5), scheme)


def test_rms_norm_and_its_residual() -> None:
    norm = nn.RMSNorm(torch.rand(64), 1e-5)
    torch_norm = torch.nn.RMSNorm(64, 1e-5)
    torch_norm.load_state_dict(norm.state_dict())
    x, residual = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
    close(norm(x), torch_norm(x))
    total = x + residual
    out, new_residual = norm(x.clone(), residual)
    close(out, torch_norm(total))
    assert new_residual is residual
    close(residual, total)
    with pytest.raises(ValueError, match=r"residual must have x's shape \[2, 3, 64\], got \[3, 2, 64\]"):
        norm(x, torch.randn(3, 2, 64))


def test_any_model_is_quantized_in_place(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    torch.manual_seed(1)
    model = Block()
    expected = copy.deepcopy(model)
    for layer in (expected.up, expected.down):
        layer.weight.data = quantize(layer.weight.data, "int4_g64").dequantize()
    assert gristmill.quantize_module(model, "int4_g64") is model
    kinds = {name: type(module).__module__ for name, module in model.named_children()}
    assert [name for name, kind in kinds.items() if kind == "gristmill.nn"] == ["up", "down"]
    ids = torch.randint(64, (2, 9))
    close(model(ids), expected(ids))
    other = gristmill.quantize_module(Block(), "int4_g64")
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(ids), model(ids))


def test_a_module_in_several_places_is_replaced_in_all_of_them() -> None:
    shared = float_layer(256, 256)
    model = torch.nn.Sequential(shared, torch.nn.Sequential(shared))
    gristmill.quantize_module(model, "int8_ch")
    assert type(model[0]) is nn.Linear and model[1][0] is model[0]


def test_hooks_go_over() -> None:
    model = torch.nn.Sequential(float_layer())
    removed = model[0].register_forward_hook(lambda module, arguments, y: y * 0)
    model[0].register_forward_pre_hook(
        lambda module, arguments, named: ((2 * arguments[0],), named), with_kwargs=True
    )
    gristmill.quantize_module(model, "int8_ch")
    x = torch.randn(3, 256)
    assert not model(x).any()
    removed.remove()
    close(model(x), nn.Linear.from_float(float_layer(), "int8_ch")(2 * x))


@pytest.mark.parametrize("skip", [(), ("*.linear2",)])
@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_of_torch_leaves_its_fast_path(skip: tuple[str, ...], norm_first: bool) -> None:
    """Which reads weights instead of calling modules, and is taken in eval mode alone. Its attention stays in floats, with the projection behind
    it."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=norm_first)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    rounded, x = copy.deepcopy(model), torch.randn(2, 5, 64)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for one in rounded.layers:
        for linear in (one.linear1, one.linear2)[: 2 - len(skip)]:
            linear.weight.data = quantize(linear.weight.detach(), "int8_ch").dequantize()
    gristmill.quantize_module(model, "int8_ch", skip=skip)
    assert [type(model.layers[1].linear1), type(model.layers[1].linear2)] == [
        nn.Linear,
        torch.nn.Linear if skip else nn.Linear,
    ]
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            close(model(x), rounded(x))
            close(model.layers[0](x), rounded.layers[0](x))
            for some in (model, copy.deepcopy(model)):
                close(
                    some(x, src_key_padding_mask=padding)[~padding],
                    rounded(x, src_key_padding_mask=padding)[~padding],
                )
    attention = gristmill.quantize_module(
        torch.nn.ModuleList([copy.deepcopy(model.layers[0].self_attn)]), "int8_ch"
    )
    with torch.no_grad():
        close(attention[0](x, x, x)[0], rounded.layers[0].self_attn(x, x, x)[0])  # type: ignore[index]


def test_a_model_that_is_one_layer_is_refused() -> None:
    for layer in (float_layer(), torch.nn.Embedding(8, 64)):
        with pytest.raises(ValueError, match=rf"use gristmill.nn.{type(layer).__name__}.from_float"):
            gristmill.quantize_module(layer, "int8_ch", embeddings=True)
        assert not list(layer.children())


def test_a_quantized_model_compiles_to_one_call_per_layer() -> None:
    model, graphs = gristmill.quantize_module(Block(), "int4_g64", skip=()), []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for size in (5, 9, 17):
        ids = torch.randint(64, (2, size))
        close(compiled(ids), model(ids))
    assert len(graphs) <= 2
    calls = [str(node.target) for node in graphs[-1].graph.nodes if node.op == "call_function"]
    assert calls.count("gristmill.linear.default") == 3


@pytest.mark.parametrize("compiled", [Block], ids=["inductor"])
def test_it_compiles_with_inductor(compiled: type, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    layers = torch.nn.Sequential(
        nn.Linear.from_float(float_layer(128, 256), "int4_g128"),
        nn.RMSNorm(torch.rand(128)),
        nn.Linear.from_float(float_layer(64, 128), "int8_ch"),
    )
    x = torch.randn(6, 256)
    assert torch.equal(torch.compile(layers, fullgraph=True)(x), layers(x))


def test_a_layer_that_the_scheme_does_not_take_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(100, 32))
    with pytest.raises(ValueError, match=r"^0: .*; leave it out with skip=\['0', ...\]"):
        gristmill.quantize_module(model, "int4_g128")
    with pytest.raises(ValueError, match="int5"):
        gristmill.quantize_module(model, "int5_g7x")
    with pytest.raises(ValueError, match=r"the bias of a Linear of 48 rows is \[48\], got \[7\]"):
        nn.Linear(quantize(torch.randn(48, 64), "int8_ch"), torch.zeros(7))


@torch.no_grad()
def test_a_model_of_transformers() -> None:
    """Compares with the same model with rounded weights; one doubled scale is noticed."""
    quantized, rounded = load(MODELS / LLAMA), load(MODELS / LLAMA)
    gristmill.quantize_module(quantized, "int4_g128")
    layers = {n: m for n, m in quantized.named_modules() if isinstance(m, nn.Linear)}
    assert len(layers) == 7 * quantized.config.num_hidden_layers
    for name, layer in layers.items():
        rounded.get_submodule(name).weight.copy_(layer.weight().dequantize())
    ids = torch.tensor([eval_tokens()[:64]])
    expected = rounded(ids).logits
    torch.testing.assert_close(quantized(ids).logits, expected, rtol=1e-3, atol=1e-3)
    layer = layers["model.layers.0.mlp.down_proj"]
    weight = layer.weight()
    weight.scales[3, 0] *= 2
    layer.set_weight(weight)
    assert (quantized(ids).logits - expected).abs().max() > 1e-3
