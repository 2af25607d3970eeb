"""Run every configuration of the CUDA kernels of linear once, on small problems, under compute-sanitizer.

    compute-sanitizer --tool memcheck --kernel-name kernel_substring=linear_ python -m lab.linear_sanitized
    compute-sanitizer --tool racecheck --kernel-name kernel_substring=linear_ python -m lab.linear_sanitized

racecheck does not see that one lane's arrival at a barrier follows the reads of its warp. Build kernels in which every lane arrives:
``cmake -DGRISTMILL_NVCC_FLAGS=-DGM_RACECHECK``. Exit status 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch

from gristmill.autotune.device import device_target
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.load import load
from gristmill.quant import QuantTensor, pack, quantize
from lab.gpu_graphs import DEVICE, column_error

SCHEMES = "int4_g128,int4_g32_zp,nvfp4,mxfp4,int8_ch,fp8_block"
PROBLEMS = "7x200x2304,16x200x2304,33x328x640,70x328x640,300x2120x1280"
"""M x N x K: the smallest problems that reach each kind of reduction, with rows and columns that are not a multiple of a tile."""
LIMIT = 6e-3


def configs(kernel: Kernel, scheme: str, m: int, n: int, k: int) -> Iterator[Config]:
    """The configurations of the kernel for a problem that differ in code. Bands and ring depths do not."""
    problem = default_registry().op("linear").problem(f"m={m},n={n},k={k},w={scheme}")
    if kernel.space is None or kernel.accepts(problem):
        return
    seen_keys = set()
    for config in kernel.space(problem, device_target(DEVICE, Policy())):
        key = tuple((name, value) for name, value in config.items() if name not in ("raster", "depth"))
        if key not in seen_keys:
            seen_keys.add(key)
            yield config


def run(
    kernel: Kernel, config: Config, x: torch.Tensor, q: QuantTensor, tensors: list[torch.Tensor]
) -> float:
    """Run once; the error per column."""
    out = torch.full((x.shape[0], q.n), float("nan"), dtype=x.dtype, device=DEVICE)
    load(kernel)(
        config, default_registry().op("linear").Call(x.to(DEVICE), tensors, None, None, False, q.n, out=out)
    )
    return column_error(out.cpu(), x, q.dequantize())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--schemes", default=SCHEMES, help="by commas")
    parser.add_argument("--problems", default=PROBLEMS, help="MxNxK, by commas")
    options = parser.parse_args(arguments)
    registry, wrong, count = default_registry(), 0, 0
    kernels = [
        kernel
        for kernel in registry.kernels_of("linear")
        if kernel.language == "cuda" and kernel.provider == "gristmill"
    ]
    for scheme in options.schemes.split(","):
        for text in options.problems.split(","):
            m, n, k = (int(part) for part in text.split("x"))
            q, x = quantize(torch.randn(n, k), scheme), torch.randn(m, k).bfloat16()
            for kernel in kernels:
                names = [name for name in kernel.layouts if registry.layout(name).accepts(scheme)]
                if not names:
                    continue
                tensors = [t.to(DEVICE) for t in pack(q, names[0]).tensors]
                for config in configs(kernel, scheme, m, n, k):
                    count += 1
                    if not run(kernel, config, x, q, tensors) < LIMIT:
                        wrong += 1
                        print(f"wrong: {kernel.name} {scheme} {text} {config}")
        print(f"{scheme}: {count} calls so far, {wrong} wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
