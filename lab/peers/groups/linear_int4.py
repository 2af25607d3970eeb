"""Products with weights in int4 in groups of 128; cuBLAS multiplies them in bf16."""

from lab.peers.arguments import linear
from lab.peers.group import Group

M = "m=1|8|16|64|96|192|512|2048"
FEW = "m=1|16|64|192|2048"
GROUPS = (
    Group(
        name="linear_int4",
        op="linear",
        inputs=linear,
        models={
            "Llama-3-8B": (f"{M},n=6144,k=4096,w=int4_g128", f"{M},n=4096,k=14336,w=int4_g128"),
            "Llama-3-8B TP 2": (f"{FEW},n=14336,k=4096,w=int4_g128",),
            "Llama-3-70B TP 2": (f"{FEW},n=5120,k=8192,w=int4_g128", f"{FEW},n=28672,k=8192,w=int4_g128"),
            "Llama-3-70B TP 4": (f"{FEW},n=8192,k=7168,w=int4_g128",),
            "Qwen3-8B": (f"{FEW},n=24576,k=4096,w=int4_g128",),
            "Qwen3-30B-A3B": (f"{FEW},n=5120,k=2048,w=int4_g128",),
            "Gemma 3 12B": (f"{FEW},n=30720,k=3840,w=int4_g128",),
        },
        tiny=("m=1|7,n=96,k=256,w=int4_g128",),
    ),
)
