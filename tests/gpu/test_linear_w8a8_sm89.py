"""linear_w8a8_sm89 on whatever GPU is here: every instance and partition within the bound of its sums, the quantizers bit for bit, tails, strides,
given codes, repeated calls, graphs, the examples of the operation."""

from __future__ import annotations

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.autotune.verify import verify
from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels import given_codes
from gristmill.kernels.linear.frag16_sm80.gemm import COUNTER_BYTES
from gristmill.kernels.linear.w8a8_sm80._launch import rows_of as rows_to_quantize
from gristmill.kernels.linear.w8a8_sm80._launch_sm89 import launch
from gristmill.kernels.linear.w8a8_sm80._launch_sm89 import quantize as quantize_rows
from gristmill.kernels.linear.w8a8_sm80.shapes import FP8, FP8_BLOCK, OPERANDS, pitch_of, room_of
from gristmill.quant import QuantTensor, pack, quantize
from gristmill.quant.activations import quantize_activation
from tests.calls import make_call
from tests.conftest import HAS_GPU
from tests.kernels.machine_code import library_of

NEWER = HAS_GPU and torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not NEWER, reason="needs an NVIDIA GPU from sm_89 on"),
    pytest.mark.skipif(not library_of("89").is_file(), reason="compute_89 is not in this build"),
]
DEVICE = "cuda:0"
OP = default_registry().op("linear")
KERNEL = default_registry().kernel("linear", "linear_w8a8_sm89")
SCHEMES = (*FP8.schemes, *FP8_BLOCK.schemes)
SUM = 2.0**-10
"""Of the sum of the sizes of the products: 32 of them, each cut to 13 bits of the fraction of the largest."""


def configs(scheme: str) -> list[Config]:
    """Every instance: a CTA per tile; CTAs that walk over tiles; tiles shared by CTAs evenly and unevenly, and none because there is too little to
    share."""
    (operands,) = (one for one in OPERANDS.values() if scheme in one.schemes)
    plain = {"format": operands.format, "activation": scheme.partition(".")[2]}
    return [
        {**plain, "mt": shape.mt, "warps": shape.warps, "grid": grid, "share": share}
        for shape in operands.shapes
        for grid, share in ((1, 0), (3, 0), (4, 1), (7, 1), (61, 1), (4000, 1))
    ]


def rows_of(m: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> torch.Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    sizes = torch.exp(torch.randn(m, 1, device=DEVICE, generator=generator))
    return (torch.randn(m, k, device=DEVICE, generator=generator) * sizes).to(dtype)


def weight(n: int, k: int, scheme: str) -> QuantTensor:
    """A random weight."""
    return quantize(rows_of(n, k, torch.float32, seed=2), scheme.partition(".")[0])


def check(
    y: torch.Tensor,
    x: torch.Tensor,
    q: QuantTensor,
    form: str,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """y within the bound of its sums and of its rounding of the product in float64."""
    values, w = quantize_activation(x, form).dequantize().double(), q.dequantize().double()
    exact, size = values @ w.T, values.abs() @ w.abs().T
    for one in (bias, residual):
        exact = exact if one is None else exact + one.double()
        size = size if one is None else size + one.double().abs() / 2**12
    bound = SUM * size + torch.finfo(y.dtype).eps * exact.abs() + torch.finfo(y.dtype).tiny
    assert bool(((y.double() - exact).abs() <= bound).all())


def run(
    x: torch.Tensor,
    q: QuantTensor,
    config: Config,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    given: bool = False,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Calls the kernel once, into the middle of a poisoned buffer, and checks that the rows around it stay untouched."""
    m, n = x.shape[0], q.n
    buffer = torch.full((m + 2, n), float("nan"), dtype=x.dtype, device=DEVICE)
    out, tensors = buffer[1 : m + 1], pack(q, "plain_v1").tensors
    codes, scales = given_codes.codes_of(x, str(config["activation"])) if given else (None, None)
    launch(
        config,
        make_call(
            "linear", x, tensors, bias, residual, False, n, workspace, codes=codes, scales=scales, out=out
        ),
    )
    assert bool(buffer[0].isnan().all()) and bool(buffer[m + 1].isnan().all())
    return out


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(1000, 4096), (17, 272), (257, 16)])
def test_every_instance_is_within_the_bound(scheme: str, n: int, k: int, dtype: torch.dtype) -> None:
    q = weight(n, k, scheme)
    for m in (1, 7, 16, 64, 131, 257):
        x = rows_of(m, k, dtype)
        for config in configs(scheme):
            y = run(x, q, config)
            check(y, x, q, str(config["activation"]))
            assert torch.equal(run(x, q, config), y), "repeated"
            assert torch.equal(run(x, q, config, given=True), y), "given codes"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("m", "n"), [(3, 200), (70, 1003)])
def test_bias_residual_and_a_dirty_workspace(scheme: str, m: int, n: int) -> None:
    q, x = weight(n, 2048, scheme), rows_of(m, 2048)
    bias, residual = rows_of(1, n)[0], rows_of(m, n, seed=5)
    for config in configs(scheme):
        size = room_of(config, m, 2048, 0, given=False).size
        workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
        workspace[:COUNTER_BYTES] = 0
        check(
            run(x, q, config, bias, residual, False, workspace),
            x,
            q,
            str(config["activation"]),
            bias,
            residual,
        )
        assert not bool(workspace[:COUNTER_BYTES].any()), "counters are zero after a call"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["fp8_token", "fp8_g128", "fp8"])
def test_the_quantizers_bit_for_bit(form: str, dtype: torch.dtype) -> None:
    blocks = form == "fp8_g128"
    config: Config = {
        "format": FP8_BLOCK.format if blocks else FP8.format,
        "activation": form,
        "mt": 16,
        "warps": 4,
        "grid": 1,
        "share": 0,
    }
    for m, k in ((1, 16), (3, 144), (70, 2880), (300, 8224)):
        x = rows_of(m, k, dtype)
        room = room_of(config, m, k, 0, given=False)
        workspace = torch.full((room.size,), 255, dtype=torch.uint8, device=DEVICE)
        quantize_rows(config, rows_to_quantize(x, m, k, workspace.data_ptr(), room))
        expected = quantize_activation(x, form)
        codes = workspace[room.codes : room.codes + m * k].view(m, k)
        assert torch.equal(codes, expected.values.view(torch.uint8)), (m, k)
        groups = -(-k // 128) if blocks else 1
        scales = workspace[room.scales :].view(torch.float32)[: groups * pitch_of(m)].view(groups, -1)
        rows = 1 if form == "fp8" else m
        assert torch.equal(scales[:, :rows].T.reshape(-1), expected.scales.reshape(-1)), (m, k)


def test_planted_faults_show() -> None:
    """A doubled scale, a code of another size, a row of x replaced."""
    for scheme in SCHEMES:
        q, x = weight(300, 512, scheme), rows_of(64, 512)
        codes, other = q.codes.clone(), x.clone()
        codes[7, 500:] ^= 0x38
        other[63] = x[0]
        for config in configs(scheme):
            form = str(config["activation"])
            for rows, one in ((x, q.with_tensors({**q.tensors(), "codes": codes}, q.shape)), (other, q)):
                with pytest.raises(AssertionError):
                    check(run(rows, one, config), x, q, form)


def test_strided_and_unaligned_rows_of_x_give_the_same_bits() -> None:
    for scheme in SCHEMES:
        q, x, config = weight(130, 1152, scheme), rows_of(20, 1152), configs(scheme)[2]
        y = run(x, q, config)
        for offset, stride in ((0, 1160), (1, 1153), (3, 1168)):
            wide = torch.full((20, stride + 8), float("nan"), dtype=x.dtype, device=DEVICE)
            view = wide[:, offset : offset + 1152]
            view.copy_(x)
            assert torch.equal(run(view, q, config), y), (scheme, offset, stride)


def test_every_example() -> None:
    target = Target.parse("sm_89")
    problems = [OP.problem(text) for text in (*KERNEL.examples, *map(str, OP.examples))]
    accepted = [problem for problem in problems if KERNEL.accepts(problem) is None]
    assert len(accepted) > len(KERNEL.examples)
    for problem in accepted:
        for config in KERNEL.space(problem, target):  # type: ignore[misc]
            result = verify(OP, KERNEL, config, problem, DEVICE)
            assert result.ok, (str(problem), config, result)


def test_a_captured_graph() -> None:
    for scheme in SCHEMES:
        q, x, config = weight(512, 8192, scheme), rows_of(5, 8192), configs(scheme)[4]
        workspace = torch.zeros(
            room_of(config, 5, 8192, 0, given=False).size, dtype=torch.uint8, device=DEVICE
        )
        out = torch.empty(5, 512, dtype=x.dtype, device=DEVICE)
        call = make_call("linear", x, pack(q, "plain_v1").tensors, None, None, False, 512, workspace, out)
        launch(config, call)
        y = out.clone()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            launch(config, call)
        for _ in range(20):
            out.zero_()
            graph.replay()
            assert torch.equal(out, y)
