"""RMSNorm, alone and with the residual added before."""

from lab.peers.arguments import of_operation
from lab.peers.group import Group

GROUPS = (
    Group(
        name="add_rms_norm",
        op="fused_add_rms_norm",
        inputs=of_operation,
        models={
            "Llama-3-8B": ("m=1|64|2048,n=4096",),
            "Qwen3-0.6B": ("m=1|2048,n=1024",),
            "DeepSeek-V3": ("m=1|64|1024|16384,n=7168",),
        },
        tiny=("m=3,n=64",),
    ),
    Group(
        name="rms_norm",
        op="rms_norm",
        inputs=of_operation,
        models={
            "DeepSeek-V3": ("m=1|64|2048,n=1536", "m=64|2048,n=512"),
            "Gemma 3 12B": ("m=64|2048,n=3840",),
        },
        tiny=("m=3,n=64",),
    ),
)
