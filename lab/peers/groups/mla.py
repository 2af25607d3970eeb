"""Multi-head latent attention of DeepSeek-V3: decode over the cache of latents, prefill with a key for every head."""

from lab.peers.arguments import of_operation
from lab.peers.group import Group
from lab.peers.groups.attention import decode, limit, prefill

GROUPS = (
    Group(
        name="mla_decode",
        op="mla_attention",
        inputs=of_operation,
        limit=limit,
        models={
            "DeepSeek-V3": (
                f"{decode(1, 4096)},heads=128",
                f"{decode(16, 4096)},heads=128",
                f"{decode(128, 1024)},heads=128",
                f"{decode(128, 4096)},heads=128",
                f"{decode(48, 8192, 190000)},heads=128",
            ),
            "DeepSeek-V3 TP 8": (
                f"{decode(1, 4096)},heads=16",
                f"{decode(1, 65536)},heads=16",
                f"{decode(128, 4096)},heads=16",
            ),
        },
        tiny=(f"{decode(2, 70)},heads=4",),
    ),
    Group(
        name="mla_prefill",
        op="varlen_attention",
        inputs=of_operation,
        limit=limit,
        models={
            "DeepSeek-V3": (
                f"{prefill(2048)},heads=128,kv_heads=128",
                f"{prefill(4096)},heads=128,kv_heads=128",
                "q_tokens=4100,seqs=3,max_q=2300,max_ctx=2300,total_ctx=4100,heads=128,kv_heads=128",
            ),
            "DeepSeek-V3 TP 8": (f"{prefill(2048)},heads=16,kv_heads=16",),
        },
        tiny=(f"{prefill(30)},heads=4,kv_heads=4",),
    ),
)
