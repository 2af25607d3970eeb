"""Weight-only linear at M <= 16 by mma.sync and cp.async for every NVIDIA GPU from sm_80 on: linear_w4a16_decode_sm80, linear_w8a16_decode_sm80,
linear_gguf_decode_sm80.

int4 in groups of 32, 64, 128 or a row, with or without zero points, act-order included; mxfp4 and nvfp4; int8 in groups of 32, 128 or a row;
FP8 (E4M3) under a scale of the tensor, of a row or of a 128 x 128 block; Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K of GGUF files as stored. The
tiles are those of the kernels for Hopper. Sums meet in a fixed order: results are bitwise repeatable.
"""

from __future__ import annotations

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.linear.frag16_sm80 import decode
from gristmill.kernels.linear.frag16_sm80._kernel import GGUF, W4, W8, Schedule, kernel


def misfit(m: int, config: Config) -> str | None:
    """A CTA takes all rows of x."""
    nt = int(config["nt"])
    return None if m <= 8 * nt else f"a CTA has {8 * nt} columns for rows of x, not {m}"


DECODE = Schedule(
    name="decode",
    ranked=decode.ranked,
    misfit=misfit,
    workspace_bytes=decode.workspace_of,
    rows=decode.ROWS,
    summary="M <= 16: {} straight into tensor-core operands, x by cp.async, deterministic split of K",
    priority=105,
    examples={
        "w4a16": (
            "m=16,n=257,k=4096,w=int4_g128",
            "m=8,n=48,k=16384,x=fp16,w=int4_g128",
            "m=9,n=66,k=1152,x=fp16,w=int4_g32_zp,epilogue=bias+silu_mul",
            "m=16,n=130,k=2056,w=int4_g32",
            "m=1,n=4112,k=1000,w=int4_g64_zp,epilogue=bias+residual",
            "m=3,n=40,k=640,x=fp16,w=int4_g128_zp,act_order=true",
            "m=7,n=130,k=4128,w=mxfp4",
            "m=16,n=257,k=1056,x=fp16,w=mxfp4,epilogue=bias+residual",
            "m=12,n=66,k=2064,w=nvfp4,epilogue=bias+silu_mul",
            "m=2,n=1025,k=8192,x=fp16,w=nvfp4",
        ),
        "w8a16": (
            "m=16,n=257,k=4096,w=int8_g128",
            "m=8,n=48,k=16384,x=fp16,w=int8_ch",
            "m=9,n=66,k=1152,w=int8_g32,epilogue=bias+silu_mul",
            "m=1,n=4112,k=1000,x=fp16,w=int8_g32,epilogue=bias+residual",
            "m=3,n=40,k=640,w=int8_g128,act_order=true",
            "m=16,n=300,k=2056,w=fp8_block",
            "m=5,n=130,k=1000,x=fp16,w=fp8_ch,epilogue=bias+residual",
            "m=11,n=66,k=4096,w=fp8,epilogue=bias+silu_mul",
        ),
        "gguf": (
            "m=16,n=257,k=4096,w=int4_g32_min",
            "m=8,n=48,k=16384,x=fp16,w=int4_g32_min",
            "m=9,n=66,k=1152,w=int5_g32,epilogue=bias+silu_mul",
            "m=1,n=4112,k=992,x=fp16,w=int5_g32_min,epilogue=bias+residual",
            "m=3,n=40,k=640,w=int5_g32_min,act_order=true",
            "m=16,n=300,k=2064,w=int6_g16",
            "m=5,n=1030,k=4096,x=fp16,w=int6_g16",
        ),
    },
)

KERNELS = (kernel(DECODE, W4), kernel(DECODE, W8), kernel(DECODE, GGUF))
