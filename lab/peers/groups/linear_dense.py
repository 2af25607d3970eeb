"""Products with weights in bf16."""

from lab.peers.arguments import linear
from lab.peers.group import Group

M = "m=1|16|64|256|2048"
GROUPS = (
    Group(
        name="linear_dense",
        op="linear",
        inputs=linear,
        models={
            "Qwen3-0.6B": (f"{M},n=6144,k=1024",),
            "Llama-3-8B": (f"{M},n=6144,k=4096", f"{M},n=4096,k=14336"),
            "Llama-3-70B TP 4": ("m=1|64|2048,n=2560,k=8192", "m=1|64|2048,n=14336,k=8192"),
            "Qwen3-30B-A3B": ("m=1|64|2048,n=5120,k=2048",),
            "gpt-oss-20b": ("m=1|64|2048,n=5120,k=2880",),
            "Gemma 3 12B": ("m=1|64|2048,n=8192,k=3840",),
            "DeepSeek-V3": ("m=1|64|2048,n=2112,k=7168",),
        },
        tiny=("m=1|7,n=96,k=128",),
    ),
)
