"""linear_fp4_sm120 and linear_mxfp8_sm120 on whatever GPU is here: every instance and partition, tails, strides, repeated calls, graphs.

On others than sm_120 and sm_121 the library is built with the block-scaled instruction replaced by dequantizing and mma.m16n8k16
(GM_BLOCK_SCALE_BY_BF16): that runs all but the instruction.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels import native
from gristmill.kernels.cuda_ptx import ptx_entry
from gristmill.kernels.linear.block_scaled_sm120._launch import launch
from gristmill.kernels.linear.block_scaled_sm120.shapes import SHAPES, room_of
from gristmill.kernels.linear.frag16_sm80.gemm import COUNTER_BYTES
from gristmill.kernels.linear.op import error, reference, tolerance
from gristmill.quant import QuantTensor, pack, quantize
from gristmill.quant.activations import quantize_activation
from tests.calls import make_call
from tests.conftest import HAS_GPU

NVIDIA = HAS_GPU and torch.version.hip is None
CAPABILITY = torch.cuda.get_device_capability() if NVIDIA else (0, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CAPABILITY < (8, 9), reason="needs an NVIDIA GPU that converts e4m3, sm_89 and newer"),
]
DEVICE = "cuda:0"
ROOT = Path(__file__).resolve().parents[2]
OP = default_registry().op("linear")
SOURCES = sorted((ROOT / "kernels/linear/block_scaled_sm120").glob("_*_sm120f.cu"))
Config = dict[str, int | str]
CONFIGS: list[Config] = [
    {"format": format, "mt": shape.mt, "warps": shape.warps, "grid": grid, "share": share}
    for format, shapes in SHAPES.items()
    for shape in shapes
    for grid, share in ((1, 0), (3, 0), (4, 1), (7, 1), (61, 1), (4000, 1))
]
"""Every instance: a CTA per tile; CTAs that walk over tiles; tiles shared by CTAs evenly and unevenly, and none because there is too
little to share."""


def library_for(sources: list[Path], build: Path) -> Iterator[None]:
    """The library itself on sm_120 and sm_121, elsewhere one of these sources in which other instructions multiply."""
    if CAPABILITY[0] == 12:
        yield
        return
    if shutil.which("nvcc") is None or shutil.which("cmake") is None:
        pytest.skip("needs nvcc and cmake to build the library for this GPU")
    options = {
        "SKBUILD_STATE": "wheel",
        "GRISTMILL_CUDA": "on",
        "GRISTMILL_HIP": "off",
        "GRISTMILL_SM90_SOURCES": str(ROOT / "tests/packaging/_scale_sm90.cu"),
        "GRISTMILL_SM120f_SOURCES": ";".join(map(str, sources)),
        "GRISTMILL_SM120f_AS": f"{CAPABILITY[0]}{CAPABILITY[1]}",
        "GRISTMILL_NVCC_FLAGS": "-DGM_BLOCK_SCALE_BY_BF16",
    }
    arguments = [f"-D{name}={value}" for name, value in options.items()]
    subprocess.run(["cmake", "-S", ROOT, "-B", build, *arguments], check=True)
    subprocess.run(["cmake", "--build", build, "--target", "gristmill_cuda_compute120f"], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library_dir", lambda: build / "_lib")
        for cached in (native.cuda_library, native.cuda_function, ptx_entry):
            cached.cache_clear()
        yield
    for cached in (native.cuda_library, native.cuda_function, ptx_entry):
        cached.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of linear's sources."""
    yield from library_for(SOURCES, tmp_path_factory.mktemp("build"))


def rows_of(m: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> torch.Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    sizes = torch.exp(torch.randn(m, 1, device=DEVICE, generator=generator))
    return (torch.randn(m, k, device=DEVICE, generator=generator) * sizes).to(dtype)


def weight(format: str, n: int, k: int) -> QuantTensor:
    """A random weight whose rows have different sizes."""
    return quantize(rows_of(n, k, torch.float32, seed=2), format)


def run(
    x: torch.Tensor,
    q: QuantTensor,
    config: Config,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    silu_mul: bool = False,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Calls the kernel once, into the middle of a poisoned buffer, and checks that the rows around it stay untouched."""
    m, n = x.shape[0], q.n // 2 if silu_mul else q.n
    buffer = torch.full((m + 2, n), float("nan"), dtype=x.dtype, device=DEVICE)
    out, tensors = buffer[1 : m + 1], pack(q, "plain_v1").tensors
    launch(config, make_call("linear", x, tensors, bias, residual, silu_mul, q.n, workspace, out))
    assert buffer[0].isnan().all() and buffer[-1].isnan().all(), "written outside"
    return out


def wrong(
    x: torch.Tensor,
    q: QuantTensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    silu_mul: bool = False,
) -> float:
    """The error of a result, in tolerances of the operation."""
    paired = QuantTensor(
        q.codes,
        q.scales,
        q.shape,
        QuantScheme.parse(f"{q.scheme}.{q.scheme}"),
        global_scale=q.global_scale,
    )
    arguments = [x, paired, bias, residual, silu_mul, q.n, None]
    flags = [
        name
        for name, on in (
            ("bias", bias is not None),
            ("residual", residual is not None),
            ("silu_mul", silu_mul),
        )
        if on
    ]
    problem = OP.problem(
        {
            "m": x.shape[0],
            "n": q.n,
            "k": q.k,
            "x": "fp16" if x.dtype == torch.float16 else "bf16",
            "w": str(paired.scheme),
            "epilogue": "+".join(flags) or "none",
        }
    )
    expected = reference(x, paired, bias, residual, silu_mul)
    return error(problem, arguments, [out], [expected]) / tolerance(problem).limit


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(map(str, c.values())))
def test_every_instance_and_partition(config: Config) -> None:
    form = str(config["format"])
    for m, n, k, dtype in ((1, 257, 512, torch.bfloat16), (int(config["mt"]) + 3, 520, 1152, torch.float16)):
        x, q = rows_of(m, k, dtype), weight(form, n, k)
        bias, residual = rows_of(1, n, dtype)[0], rows_of(m, n, dtype, seed=5)
        assert wrong(x, q, run(x, q, config, bias, residual), bias, residual) < 1


@pytest.mark.parametrize("format", list(SHAPES))
def test_the_quantizer_follows_the_rules_bit_for_bit(format: str) -> None:
    scheme = QuantScheme.parse(format)
    config: Config = {"format": format, "mt": 16, "warps": 4, "grid": 1, "share": 0}
    for m, k, dtype in ((1, 128, torch.bfloat16), (300, 1152, torch.float16)):
        x = rows_of(m, k + 8, dtype)[:, :k]
        room = room_of(config, m, k, 0)
        workspace = torch.zeros(room.size, dtype=torch.uint8, device=DEVICE)
        run(x, weight(format, 8, k), config, workspace=workspace)
        expected = quantize_activation(x, format)
        codes = workspace[room.codes :][: m * scheme.code_bytes(k)].view(m, -1)
        scales = workspace[room.scales :][: m * scheme.groups(k)].view(m, -1)
        assert torch.equal(codes, expected.values.view(torch.uint8))
        assert torch.equal(scales, expected.scales.view(torch.uint8))
        if expected.global_scale is not None:
            assert torch.equal(workspace[room.factor :][:4].view(torch.float32), expected.global_scale)


@pytest.mark.parametrize("format", list(SHAPES))
def test_results_repeat_and_counters_return_to_zero(format: str) -> None:
    config: Config = {"format": format, "mt": 64, "warps": SHAPES[format][2].warps, "grid": 61, "share": 1}
    x, q = rows_of(70, 4096), weight(format, 520, 4096)
    workspace = torch.zeros(room_of(config, 70, 4096, 520).size, dtype=torch.uint8, device=DEVICE)
    first = run(x, q, config, workspace=workspace)
    for _ in range(20):
        assert torch.equal(run(x, q, config, workspace=workspace), first)
    assert not workspace[:COUNTER_BYTES].any()
    assert wrong(x, q, run(x, q, config, silu_mul=True, workspace=workspace), silu_mul=True) < 1


def test_a_graph_replays_it() -> None:
    config: Config = {"format": "nvfp4", "mt": 16, "warps": 4, "grid": 7, "share": 1}
    x, q, out = (
        rows_of(5, 1024),
        weight("nvfp4", 260, 1024),
        torch.empty(5, 260, dtype=torch.bfloat16, device=DEVICE),
    )
    workspace = torch.zeros(room_of(config, 5, 1024, 0).size, dtype=torch.uint8, device=DEVICE)
    call = make_call("linear", x, pack(q, "plain_v1").tensors, None, None, False, 260, workspace, out)
    launch(config, call)
    first, graph = out.clone(), torch.cuda.CUDAGraph()
    with capturing(graph):
        launch(config, call)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, first)
