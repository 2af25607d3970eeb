"""Weight-only linear at any M by mma.sync and cp.async for every NVIDIA GPU from sm_80 on: linear_w4a16_gemm_sm80, linear_w8a16_gemm_sm80,
linear_gguf_gemm_sm80.

int4 in groups of 32, 64, 128 or a row, with or without zero points, act-order included; mxfp4 and nvfp4; int8 in groups of 32, 128 or a row;
FP8 (E4M3) under a scale of the tensor, of a row or of a 128 x 128 block; Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K of GGUF files as stored. Weights
are rounded to x's type once they are scaled; those of mxfp4 and nvfp4 are exact, up to a factor of their row. Tiles that do not fill the
machine evenly are dealt out along K, and their sums meet in a fixed order: results are bitwise repeatable.
"""

from __future__ import annotations

from gristmill.kernels.linear.frag16_sm80 import gemm
from gristmill.kernels.linear.frag16_sm80._kernel import GGUF, W4, W8, Schedule, kernel

GEMM = Schedule(
    name="gemm",
    ranked=gemm.ranked,
    workspace_bytes=lambda n, config: gemm.workspace_of(config),
    rows=None,
    summary="any M: {} decoded in registers for up to 128 rows of x, rings of cp.async, deterministic stream-K",
    priority=104,
    examples={
        "w4a16": (
            "m=17,n=257,k=4096,w=int4_g128",
            "m=64,n=520,k=1152,x=fp16,w=int4_g32_zp,epilogue=bias+silu_mul",
            "m=33,n=1030,k=2056,w=int4_g32",
            "m=130,n=264,k=1000,w=int4_g64_zp,epilogue=bias+residual",
            "m=300,n=40,k=640,x=fp16,w=int4_g128_zp,act_order=true",
            "m=1,n=512,k=16384,w=int4_g64",
            "m=65,n=520,k=1056,w=mxfp4,epilogue=bias+silu_mul",
            "m=200,n=130,k=4128,x=fp16,w=mxfp4",
            "m=40,n=1030,k=2064,x=fp16,w=nvfp4,epilogue=bias+residual",
            "m=129,n=257,k=4096,w=nvfp4",
        ),
        "w8a16": (
            "m=17,n=257,k=4096,w=int8_g128",
            "m=64,n=520,k=1152,x=fp16,w=int8_g32,epilogue=bias+silu_mul",
            "m=150,n=264,k=1000,w=int8_ch,epilogue=bias+residual",
            "m=300,n=40,k=640,x=fp16,w=int8_g128,act_order=true",
            "m=100,n=1030,k=2056,w=fp8_block",
            "m=33,n=130,k=1000,x=fp16,w=fp8_ch,epilogue=bias+residual",
            "m=260,n=520,k=4096,w=fp8,epilogue=bias+silu_mul",
        ),
        "gguf": (
            "m=17,n=257,k=4096,w=int4_g32_min",
            "m=64,n=520,k=1152,x=fp16,w=int4_g32_min,epilogue=bias+silu_mul",
            "m=150,n=264,k=992,w=int5_g32,epilogue=bias+residual",
            "m=300,n=40,k=640,x=fp16,w=int5_g32_min,act_order=true",
            "m=100,n=1030,k=2048,w=int5_g32_min",
            "m=33,n=130,k=1008,x=fp16,w=int6_g16,epilogue=bias+residual",
            "m=260,n=520,k=4096,w=int6_g16,epilogue=bias+silu_mul",
        ),
    },
)

KERNELS = (kernel(GEMM, W4), kernel(GEMM, W8), kernel(GEMM, GGUF))
