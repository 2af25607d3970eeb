"""linear_w4a16_tma_sm90 on a Hopper: every instance and split; tails; epilogues; poisoned and guarded outputs; repeats; streams."""

from __future__ import annotations

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.linear import linear_w4a16_tma_sm90 as spec
from gristmill.quant import QuantTensor, pack, quantize
from tests.conftest import HAS_GPU

HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (sm_90)")]
DEVICE = "cuda:0"
OP = default_registry().op("linear")
LIMIT = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
Config = dict[str, int]


def weights(n: int, k: int, seed: int = 0, scales: torch.dtype = torch.bfloat16) -> QuantTensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    rows = torch.exp(torch.randn(n, 1, device=DEVICE, generator=generator))
    q = quantize(torch.randn(n, k, device=DEVICE, generator=generator) * rows, "int4_g128")
    if scales is torch.bfloat16:
        return q
    assert q.scales is not None
    return QuantTensor(q.codes, q.scales.to(scales), q.shape, q.scheme)


def every_config(m: int, n: int, k: int, grid: int = 132) -> list[Config]:
    """Each instance with each split, and dealing tiles out along K among `grid` CTAs and one more."""
    made = []
    for shape in spec.SHAPES:
        for split in (1, 2, 4, 8):
            if split == 1 or (k // 128 >= split and split <= shape.mt // 8):
                made.append(spec._config(shape, split, 0, grid, max(m, 1), k))
        made += [spec._config(shape, 1, 1, ctas, max(m, 1), k) for ctas in (grid, grid + 1)]
    return made


def default(m: int, n: int, k: int) -> Config:
    from gristmill.autotune.device import device_target
    from gristmill.kernel_registry.policy import Policy

    return dict(spec.config(OP.problem(f"m={m},n={n},k={k},w=int4_g128"), device_target(DEVICE, Policy())))  # type: ignore[arg-type]


def run(x: torch.Tensor, q: QuantTensor, config: Config, tensors: list[torch.Tensor] | None = None, shift: int = 0,
        **epilogue: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """One call into the middle of a poisoned buffer; what lies around it must stay. shift: elements off 16-byte alignment."""
    m, n = x.shape[0], q.n
    buffer = torch.full(((m + 2) * n + shift,), float("nan"), dtype=x.dtype, device=DEVICE)
    out = buffer[n + shift : n + shift + m * n].view(m, n)
    tensors = tensors or pack(q, "w4_frag16_v1").tensors
    spec.launch(config, x, tensors, epilogue.get("bias"), epilogue.get("residual"), False, n, None, out)
    assert bool(buffer[: n + shift].isnan().all()) and bool(buffer[n + shift + m * n :].isnan().all())
    return out


def column_error(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
    """|Δyₙ| / (‖x‖·‖wₙ‖/√K), RMS over the rows of x, of the worst column."""
    reference = x.double() @ w.T
    scale = x.double().norm(dim=1, keepdim=True) * w.norm(dim=1) / w.shape[1] ** 0.5
    return float(((y.double() - reference) / scale).square().mean(0).sqrt().max())


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(1000, 1536), (201, 1024), (17, 384)])
def test_every_instance_at_257_rows(n: int, k: int, dtype: torch.dtype, scales: torch.dtype) -> None:
    q = weights(n, k, scales=scales)
    w, tensors = q.dequantize().double(), pack(q, "w4_frag16_v1").tensors
    x = torch.randn(257, k, device=DEVICE, generator=torch.Generator(device=DEVICE).manual_seed(1)).to(dtype)
    for grid in (132, 3):  # 3: a CTA walks over many tiles
        for config in every_config(257, n, k, grid):
            assert column_error(run(x, q, config, tensors), x, w) < LIMIT[dtype], config


@pytest.mark.parametrize("m", [*range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 1000])
def test_every_number_of_rows(m: int) -> None:
    n, k = 328, 640
    q = weights(n, k, seed=m)
    w, tensors = q.dequantize().double(), pack(q, "w4_frag16_v1").tensors
    x = torch.randn(m, k, device=DEVICE).bfloat16()
    reference = x.double() @ w.T
    for config in every_config(m, n, k, 5):
        y = run(x, q, config, tensors)
        assert float((y.double() - reference).norm() / reference.norm()) < 4e-3, config
        if not config["even"]:  # the other rows change nothing
            assert torch.equal(y[:1], run(x[:1], q, config, tensors)), config


def test_a_doubled_block_scale_would_show() -> None:
    q = weights(64, 512)
    x = torch.randn(257, 512, device=DEVICE).bfloat16()
    assert q.scales is not None
    wrong = QuantTensor(q.codes, q.scales.clone(), q.shape, q.scheme)
    assert wrong.scales is not None
    wrong.scales[5, 2] *= 2
    assert column_error(run(x, wrong, default(257, 64, 512)), x, q.dequantize().double()) > 10 * LIMIT[torch.bfloat16]


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_hot_gives_the_weight_rounded_once(dtype: torch.dtype, scales: torch.dtype) -> None:
    q = weights(96, 256, scales=scales)
    expected = q.dequantize().to(dtype)
    x = torch.eye(256, dtype=dtype, device=DEVICE)
    for config in every_config(256, 96, 256):
        assert torch.equal(run(x, q, config).T, expected), config


@pytest.mark.parametrize("m", [32, 64, 128, 300])
def test_a_hundred_repeats_are_identical(m: int) -> None:
    q = weights(768, 4096)
    x = torch.randn(m, 4096, device=DEVICE).bfloat16()
    tensors = pack(q, "w4_frag16_v1").tensors
    for config in every_config(m, 768, 4096, 7)[::2]:
        outs = torch.empty(100, m, 768, dtype=x.dtype, device=DEVICE)
        for out in outs:
            spec.launch(config, x, tensors, None, None, False, 768, None, out)
        assert bool((outs == outs[0]).all()), config


@pytest.mark.parametrize(("n", "shift"), [(136, 0), (131, 0), (136, 3)])
def test_epilogues_and_unaligned_tensors(n: int, shift: int) -> None:
    q = weights(n, 384)
    w, tensors = q.dequantize().double(), pack(q, "w4_frag16_v1").tensors
    wide = torch.randn(100, 391, device=DEVICE).bfloat16()
    x = wide[:, 3:387]
    bias = torch.randn(n, device=DEVICE).bfloat16()
    residual = torch.randn(100, n, device=DEVICE).bfloat16()
    for config in every_config(100, n, 384, 2):
        assert column_error(run(x, q, config, tensors, shift), x, w) < LIMIT[torch.bfloat16]
        full = run(x, q, config, tensors, shift, bias=bias, residual=residual)
        # A row of W in the wrong place of bias or residual would be an error near 0.1 in the columns of small weights.
        assert column_error(full.double() - bias.double() - residual.double(), x, w) < 2 * LIMIT[torch.bfloat16], config
    assert run(x[:0], q, default(1, n, 384)).shape == (0, n)


def test_the_workspace_is_left_as_it_was_found() -> None:
    q = weights(520, 2048)
    w, tensors = q.dequantize().double(), pack(q, "w4_frag16_v1").tensors
    x = torch.randn(200, 2048, device=DEVICE).bfloat16()
    for config in every_config(200, 520, 2048, 11):
        if not config["even"]:
            continue
        space = torch.full((spec.scratch_bytes(config),), 255, dtype=torch.uint8, device=DEVICE)
        flags = space[: spec.FLAG_BYTES].zero_()
        out = torch.empty(5, 200, 520, dtype=x.dtype, device=DEVICE)
        for y in out:
            spec.launch(config, x, tensors, None, None, False, 520, space, y)
        assert column_error(out[0], x, w) < LIMIT[torch.bfloat16], config
        assert bool((out == out[0]).all()) and not bool(flags.any()), config
    with pytest.raises(ValueError, match="workspace must be"):
        spec.launch(config, x, tensors, None, None, False, 520, space[:-1], out[0])


def test_silu_mul_follows() -> None:
    q = weights(256, 256)
    x = torch.randn(40, 256, device=DEVICE).bfloat16()
    out = torch.empty(40, 128, dtype=x.dtype, device=DEVICE)
    spec.launch(default(40, 256, 256), x, pack(q, "w4_frag16_v1").tensors, None, None, True, 256, None, out)
    gate, up = (x.double() @ q.dequantize().double().T).chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    assert float((out.double() - expected).norm() / expected.norm()) < 8e-3


def test_a_chain_of_dependent_calls_on_two_streams() -> None:
    """Programmatic dependent launch: each call reads what the one before wrote; two chains run side by side."""
    q = weights(512, 512)
    w, tensors = q.dequantize().double(), pack(q, "w4_frag16_v1").tensors
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    starts = [torch.randn(m, 512, device=DEVICE).bfloat16() for m in (48, 200)]
    chains = [[x] for x in starts]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, chain in zip(streams, chains, strict=True):
            with torch.cuda.stream(stream):
                out = torch.empty_like(chain[-1])
                spec.launch(default(out.shape[0], 512, 512), chain[-1], tensors, None, None, False, 512, None, out)
                again = torch.empty_like(out)  # straight from one launch into the next
                spec.launch(default(out.shape[0], 512, 512), out, tensors, None, None, False, 512, None, again)
                chain += [out, again / again.float().norm(dim=1, keepdim=True).to(again.dtype)]
    torch.cuda.synchronize()
    for chain in chains:
        for before, after in zip(chain, chain[1:], strict=False):
            cosine = torch.nn.functional.cosine_similarity(before.double() @ w.T, after.double())
            assert bool((cosine > 0.9999).all())


def test_the_library_refuses_what_it_was_not_built_for() -> None:
    q = weights(64, 256)
    x = torch.randn(16, 256, device=DEVICE).bfloat16()
    good = default(16, 64, 256)
    for wrong in ({"mt": 48}, {"c": 3}, {"split": 3}, {"grid": 0}, {"raster": 0}):
        with pytest.raises(ValueError, match="argument out of its range"):
            run(x, q, good | wrong)
    with pytest.raises(ValueError, match="do not pack"):
        run(x, q, good, [torch.empty(7, dtype=torch.uint8, device=DEVICE), *pack(q, "w4_frag16_v1").tensors[1:]])
