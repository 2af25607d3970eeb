"""Products with weights and activations in FP8: scales per block of 128 x 128 and per channel; x is quantized in the call, or given as codes."""

from lab.peers.arguments import linear
from lab.peers.group import Group

BLOCKS, CHANNELS = "w=fp8_block.fp8_g128", "w=fp8_ch.fp8_token"
M = "m=1|64|256|1024|4096"
GROUPS = (
    Group(
        name="linear_fp8",
        op="linear",
        inputs=linear,
        models={
            "DeepSeek-V3": (
                f"{M},n=24576,k=1536,{BLOCKS}",
                f"{M},n=7168,k=16384,{BLOCKS}",
                f"{M},n=4096,k=7168,{BLOCKS}",
                f"{M},n=7168,k=2048,{BLOCKS}",
                f"m=64|4096,n=4096,k=7168,{BLOCKS},codes=true",
            ),
            "Qwen3-8B": (f"{M},n=6144,k=4096,{BLOCKS}",),
            "Qwen3-30B-A3B": (f"{M},n=5120,k=2048,{BLOCKS}", f"{M},n=2048,k=4096,{BLOCKS}"),
            "Llama-3-8B": (f"{M},n=6144,k=4096,{CHANNELS}", f"m=64|4096,n=6144,k=4096,{CHANNELS},codes=true"),
            "Llama-3-70B TP 4": (f"{M},n=14336,k=8192,{CHANNELS}", f"{M},n=8192,k=7168,{CHANNELS}"),
        },
        tiny=(
            f"m=7,n=128,k=256,{BLOCKS}",
            f"m=7,n=128,k=256,{CHANNELS}",
            f"m=7,n=128,k=256,{BLOCKS},codes=true",
            f"m=7,n=128,k=256,{CHANNELS},codes=true",
        ),
    ),
)
