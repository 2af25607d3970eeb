"""The HIP kernels executed on the CPU: the sources that clang compiles for AMD GPUs, as C++, every lane a fiber (hip_fibers.h).

Their launchers and host halves run too. What this cannot find: faults of the compiler, and races that need real concurrency.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.op import OP, error, pack, reference
from gristmill.kernels.linear.wv_splitk_hip import _launch
from gristmill.kernels.linear.wv_splitk_hip.spec import COUNTERS, KERNELS
from gristmill.quant.argument_struct import ArgumentStruct, check_struct
from tests.calls import make_call
from tests.native import compiled_library

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "kernels" / "linear" / "wv_splitk_hip" / "_linear_wv_splitk.hip"
ENTRY = "gm_linear_wv_splitk"
LANES = {"gfx1100": 32, "gfx942": 64}
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def compiled(out: Path, lanes: int) -> ctypes.CDLL:
    """The source as a library for the CPU. RDNA multiplies bf16 by its dot product, CDNA 3 in float32."""
    defines = ["-DGM_HIP_FIBERS", f"-DGM_LANES={lanes}", f"-DGM_DOT2_BF16={int(lanes == 32)}"]
    flags = ["-O1", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas", "-Werror", *defines]
    return compiled_library.load(
        out, SOURCE, flags=flags, folders=[ROOT / "kernels" / "_native", ROOT / "tests" / "native"]
    )


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    folder = tmp_path_factory.mktemp("fibers")
    return {arch: compiled(folder / f"{arch}.so", lanes) for arch, lanes in LANES.items()}


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[ctypes.CDLL, int, int], None]]:
    """Makes the launcher call a library of fibers."""

    def switch(library: ctypes.CDLL, order: int = 0, fault: int = 0) -> None:
        def entry(name: str, struct: ArgumentStruct) -> Callable[..., int]:
            check_struct(library, name, struct)
            function = library[name]
            function.argtypes, function.restype = (ctypes.POINTER(struct.new),), ctypes.c_int
            return function

        library.gm_fibers_set(order, fault)
        monkeypatch.setattr(_launch, "hip_entry", entry)
        monkeypatch.setattr(_launch, "current_stream", lambda x: 0)

    yield switch


def run(kernel: Kernel, text: str, arch: str, split: int | None = None) -> tuple[float, torch.Tensor]:
    """The error of a problem as a multiple of its tolerance, and the output. Scratch memory is poisoned but for its counters, which must
    be zero again afterwards."""
    problem = OP.problem(text)
    config = dict(kernel.config(problem, Target.parse(arch)))
    if split is not None:
        config |= {
            "split": split,
            "chunk": config["lanes"] * {"dense": 8, "int4": 32, "int8": 16}[config["format"]],
        }
    arguments = OP.inputs(problem, 7, "cpu")
    x, weight, bias, residual, silu_mul, n, *_ = arguments
    expected = reference(x, weight, bias, residual, silu_mul)
    out = torch.full_like(expected, float("nan"))
    scratch = torch.full((kernel.workspace(problem, config).bytes,), 0xFF, dtype=torch.uint8)
    scratch[:COUNTERS] = 0
    kernel.load()(
        config, make_call("linear", x, pack(kernel, arguments)[1], bias, residual, silu_mul, n, scratch, out)
    )
    assert not scratch[:COUNTERS].any(), "counters are not restored"
    if not out.numel():
        return 0.0, out
    return error(problem, arguments, [out], [expected]) / OP.tolerance(problem).limit, out


CASES = [(kernel, text) for kernel in KERNELS for text in OP.test_problems(kernel)]


@pytest.mark.parametrize("arch", LANES)
@pytest.mark.parametrize(("kernel", "text"), CASES, ids=lambda value: getattr(value, "name", value))
def test_every_example(kernel: Kernel, text: str, arch: str, libraries: Any, use: Any) -> None:
    use(libraries[arch], len(text) % 3)
    assert run(kernel, text, arch)[0] < 1


def test_both_kernels_are_registered() -> None:
    names = {kernel.name for kernel in default_registry().kernels_of("linear") if kernel.language == "hip"}
    assert {kernel.name for kernel in KERNELS} <= names and len(CASES) >= 13


@pytest.mark.parametrize(
    "text", ["m=3,n=50,k=2048,epilogue=bias", "m=2,n=30,k=4096,w=int4_g128,epilogue=silu_mul"]
)
def test_a_split_is_right_and_does_not_depend_on_who_is_last(text: str, libraries: Any, use: Any) -> None:
    kernel = KERNELS["int4" in text]
    outputs = []
    for order in range(3):
        use(libraries["gfx1100"], order)
        ratio, out = run(kernel, text, "gfx1100", split=3)
        assert ratio < 1
        outputs.append(out)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_one_hot_rows_give_the_weight_rounded_once(kernel: Kernel, libraries: Any, use: Any) -> None:
    use(libraries["gfx1100"])
    dense = kernel is KERNELS[0]
    problem = OP.problem(f"m=8,n=40,k=256,x=fp16,w={'fp16' if dense else 'int4_g32_zp'}")
    arguments = OP.inputs(problem, 3, "cpu")
    x = torch.zeros(8, 256, dtype=torch.float16)
    columns = torch.tensor([0, 1, 7, 31, 32, 129, 200, 255])
    x[torch.arange(8), columns] = 1
    out = torch.empty(8, 40, dtype=torch.float16)
    config = kernel.config(problem, Target.parse("gfx1100"))
    kernel.load()(
        config, make_call("linear", x, pack(kernel, arguments)[1], None, None, False, 40, None, out)
    )
    expected = arguments[1].dequantize()[:, columns].T.to(torch.float16)
    assert torch.equal(out, expected)


def test_rows_of_x_apart_and_not_aligned(libraries: Any, use: Any) -> None:
    use(libraries["gfx1100"])
    problem = OP.problem("m=3,n=17,k=64")
    arguments = OP.inputs(problem, 1, "cpu")
    wide = torch.full((3, 77), float("nan"), dtype=torch.bfloat16)
    wide[:, 3:67] = arguments[0]
    out = torch.empty(3, 17, dtype=torch.bfloat16)
    config = KERNELS[0].config(problem, Target.parse("gfx1100"))
    KERNELS[0].load()(
        config,
        make_call("linear", wide[:, 3:67], pack(KERNELS[0], arguments)[1], None, None, False, 17, None, out),
    )
    assert error(problem, arguments, [out], [reference(*arguments[:2])]) < OP.tolerance(problem).limit


FAULTS = {
    1: "m=2,n=30,k=512",
    2: "m=2,n=30,k=512",
    3: "m=3,n=50,k=2048",
}


@pytest.mark.parametrize("fault", FAULTS, ids=["no barrier", "wrong lane", "counter left"])
def test_a_planted_fault_fails(fault: int, libraries: Any, use: Any) -> None:
    use(libraries["gfx1100"], 0, fault)
    if fault == 3:
        with pytest.raises(AssertionError, match="counters are not restored"):
            run(KERNELS[0], FAULTS[fault], "gfx1100", split=3)
    else:
        assert not run(KERNELS[0], FAULTS[fault], "gfx1100")[0] < 1


def test_arguments_that_do_not_fit_are_refused(libraries: Any, use: Any) -> None:
    use(libraries["gfx1100"])
    config = KERNELS[0].config(OP.problem("m=1,n=16,k=64"), Target.parse("gfx1100"))
    weight, launch = torch.zeros(16, 64, dtype=torch.bfloat16), KERNELS[0].load()
    for rows, dtype, message in (
        (9, torch.bfloat16, "at most 8 rows"),
        (1, torch.float16, "expected bf16 x"),
    ):
        x, out = torch.zeros(rows, 64, dtype=dtype), torch.zeros(rows, 16, dtype=dtype)
        with pytest.raises(ValueError, match=message):
            launch(config, make_call("linear", x, [weight], None, None, False, 16, None, out))
