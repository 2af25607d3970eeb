"""Attention over a paged cache in bf16, pages of 16: decode, prefill, and both in one call.

`total_ctx` below seqs · max_ctx makes contexts of different lengths.
"""

from gristmill.kernel_registry.problem import Problem
from lab.peers.arguments import of_operation
from lab.peers.group import Group

LLAMA = "heads=32,kv_heads=8"
LLAMA_TP4 = "heads=8,kv_heads=2"
LLAMA_70B_TP2 = "heads=32,kv_heads=4"
QWEN_06B = "heads=16,kv_heads=8"
QWEN_30B = "heads=32,kv_heads=4"
GPT_OSS = "heads=64,kv_heads=8,head_dim=64"
GEMMA = "heads=16,kv_heads=8,head_dim=256"


def limit(problem: Problem) -> float:
    """Of the worst of up to 10⁸ values, where the operation's tolerance is for a few thousand: the roundings of the result and of the reference,
    and six standard deviations of what rounding the weights to 16 bits does to a sum of many."""
    return {"bf16": 2**-7 + 6 * 1.65e-3, "fp16": 2**-10 + 6 * 2.1e-4}[problem.text("x")]


def decode(seqs: int, context: int, total: int | None = None, tokens: int = 1) -> str:
    """One or a few new tokens of each sequence; contexts of `context` each, or of `total` together."""
    lengths = f"max_q={tokens},max_ctx={context},total_ctx={total or seqs * context}"
    return f"q_tokens={seqs * tokens},seqs={seqs},{lengths}"


def prefill(tokens: int, seqs: int = 1, context: int = 0) -> str:
    """Prompts of so many tokens, at the end of contexts of `context`; 0: of the prompt alone."""
    context = context or tokens
    return f"q_tokens={tokens * seqs},seqs={seqs},max_q={tokens},max_ctx={context},total_ctx={context * seqs}"


def mixed(prompt: int, decodes: int, context: int) -> str:
    """A prompt beside decodes with contexts of half of `context` on average."""
    total = prompt + decodes * context // 2
    return f"q_tokens={prompt + decodes},seqs={decodes + 1},max_q={prompt},max_ctx={max(prompt, context)},total_ctx={total}"


GROUPS = (
    Group(
        name="attention_decode",
        op="paged_attention",
        inputs=of_operation,
        limit=limit,
        models={
            "Llama-3-8B": (
                f"{decode(1, 1024)},{LLAMA}",
                f"{decode(1, 32768)},{LLAMA}",
                f"{decode(16, 1024)},{LLAMA}",
                f"{decode(64, 4096)},{LLAMA}",
                f"{decode(256, 1024)},{LLAMA}",
                f"{decode(32, 8192, 128000)},{LLAMA}",
                f"{decode(96, 4800, 230000)},{LLAMA}",
                f"{decode(16, 4096, tokens=4)},{LLAMA}",
            ),
            "Llama-3-8B TP 4": (f"{decode(64, 4096)},{LLAMA_TP4}",),
            "Llama-3-70B TP 2": (
                f"{decode(1, 4096)},{LLAMA_70B_TP2}",
                f"{decode(80, 6100, 250000)},{LLAMA_70B_TP2}",
            ),
            "Qwen3-0.6B": (f"{decode(64, 2048)},{QWEN_06B}",),
            "Qwen3-30B-A3B": (f"{decode(64, 4096)},{QWEN_30B}",),
            "gpt-oss-20b": (
                f"{decode(64, 4096)},{GPT_OSS},sinks=true",
                f"{decode(64, 4096)},{GPT_OSS},window=128,sinks=true",
            ),
            "Gemma 3 12B": (f"{decode(16, 4096)},{GEMMA}", f"{decode(16, 4096)},{GEMMA},window=1024"),
            "Gemma 2 9B": (f"{decode(16, 4096)},{GEMMA},softcap=true",),
        },
        tiny=(
            f"{decode(3, 48)},heads=4,kv_heads=2,head_dim=64",
            f"{decode(3, 40, 77)},heads=4,kv_heads=2,head_dim=64",
            f"{decode(3, 40, 77)},heads=4,kv_heads=2,head_dim=64,window=9,sinks=true",
            f"{decode(3, 48)},heads=4,kv_heads=2,head_dim=64,softcap=true",
        ),
    ),
    Group(
        name="attention_prefill",
        op="paged_attention",
        inputs=of_operation,
        limit=limit,
        models={
            "Llama-3-8B": (
                f"{prefill(512)},{LLAMA}",
                f"{prefill(2048)},{LLAMA}",
                f"{prefill(8192)},{LLAMA}",
                f"{prefill(2048, context=16384)},{LLAMA}",
                f"{prefill(1024, seqs=4)},{LLAMA}",
            ),
            "Llama-3-70B TP 2": (f"{prefill(4096)},{LLAMA_70B_TP2}",),
            "Qwen3-0.6B": (f"{prefill(2048)},{QWEN_06B}",),
            "gpt-oss-20b": (
                f"{prefill(4096)},{GPT_OSS},sinks=true",
                f"{prefill(4096)},{GPT_OSS},window=128,sinks=true",
            ),
            "Gemma 3 12B": (f"{prefill(4096)},{GEMMA}", f"{prefill(4096)},{GEMMA},window=1024"),
            "Gemma 2 9B": (f"{prefill(4096)},{GEMMA},softcap=true",),
        },
        tiny=(f"{prefill(32)},heads=4,kv_heads=2,head_dim=64",),
    ),
    Group(
        name="attention_mixed",
        op="paged_attention",
        inputs=of_operation,
        limit=limit,
        models={
            "Llama-3-8B": (
                f"{mixed(2048, 31, 6000)},{LLAMA}",
                f"{mixed(1024, 48, 5000)},{LLAMA}",
                f"{mixed(512, 127, 2048)},{LLAMA}",
            ),
            "Llama-3-70B TP 2": (f"{mixed(2048, 31, 6000)},{LLAMA_70B_TP2}",),
            "gpt-oss-20b": (f"{mixed(2048, 31, 6000)},{GPT_OSS},sinks=true",),
            "Gemma 3 12B": (f"{mixed(2048, 15, 4096)},{GEMMA}",),
        },
        tiny=(f"{mixed(20, 3, 30)},heads=4,kv_heads=2,head_dim=64",),
    ),
)
