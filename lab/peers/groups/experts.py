"""Experts, and products of theirs: bf16, int4 in groups of 128, FP8 blocks with quantized activations, gpt-oss's mxfp4 with biases and a clamp.

Each call has tokens of its own, which choose other experts: what a call reads has left the cache for the most part.
"""

from functools import partial

from lab.peers.arguments import experts, other_routing, other_rows, rows_of_experts
from lab.peers.group import Group

M = "m=1|16|64|256|1024|4096"
QWEN_30B = "top_k=8,e=128,h=2048,i=768"
MIXTRAL = "top_k=2,e=8,h=4096,i=14336"
MIXTRAL_TP2 = "top_k=2,e=8,h=4096,i=7168"
GPT_OSS = "top_k=4,e=32,h=2880,i=2880,w=mxfp4,epilogue=w13_bias+w2_bias+clamp"
DEEPSEEK_EP8 = "top_k=8,e=32,h=7168,i=2048"
INT4, FP8 = "w=int4_g128", "w=fp8_block.fp8_g128"
SMALL = "m=3,top_k=2,e=4,h=128,i=128"
GROUPS = (
    Group(
        name="experts_bf16",
        op="moe",
        inputs=experts,
        vary=other_routing,
        models={"Qwen3-30B-A3B": (f"{M},{QWEN_30B}",), "Mixtral 8x7B TP 2": (f"{M},{MIXTRAL_TP2}",)},
        tiny=(SMALL,),
    ),
    Group(
        name="experts_int4",
        op="moe",
        inputs=experts,
        vary=other_routing,
        models={"Qwen3-30B-A3B": (f"{M},{QWEN_30B},{INT4}",), "Mixtral 8x7B": (f"{M},{MIXTRAL},{INT4}",)},
        tiny=(f"{SMALL},{INT4}",),
    ),
    Group(
        name="experts_fp8",
        op="moe",
        inputs=experts,
        vary=other_routing,
        models={
            "Qwen3-30B-A3B": (f"{M},{QWEN_30B},{FP8}",),
            "Mixtral 8x7B TP 2": (f"{M},{MIXTRAL_TP2},{FP8}",),
        },
        tiny=(f"{SMALL},{FP8}",),
    ),
    Group(
        name="experts_fp8_ep8",
        op="moe",
        inputs=partial(experts, ranks=8),
        vary=partial(other_routing, ranks=8),
        models={"DeepSeek-V3 EP 8": (f"m=16|64|256|1024|4096,{DEEPSEEK_EP8},{FP8}",)},
        tiny=(f"{SMALL},{FP8}",),
    ),
    Group(
        name="experts_bf16_ep8",
        op="moe",
        inputs=partial(experts, ranks=8),
        vary=partial(other_routing, ranks=8),
        models={"DeepSeek-V3 EP 8": (f"m=16|64|1024|4096,{DEEPSEEK_EP8}",)},
        tiny=(SMALL,),
    ),
    Group(
        name="grouped_bf16",
        op="grouped_linear",
        inputs=rows_of_experts,
        vary=other_rows,
        models={
            "Qwen3-30B-A3B": (
                "m=8|512|8192|32768,e=128,n=1536,k=2048",
                "m=8|512|8192|32768,e=128,n=2048,k=768",
            ),
            "DeepSeek-V3 EP 8": (
                "m=1|64|1024|4096,e=32,n=4096,k=7168",
                "m=1|64|1024|4096,e=32,n=7168,k=2048",
            ),
        },
        tiny=("m=7,e=3,n=64,k=128",),
    ),
    Group(
        name="experts_mxfp4",
        op="moe",
        inputs=experts,
        vary=other_routing,
        models={"gpt-oss-20b": (f"{M},{GPT_OSS}",)},
        tiny=(f"{SMALL},w=mxfp4,epilogue=w13_bias+w2_bias+clamp",),
    ),
)
