"""After a warm-up nothing is compiled while requests are served, whatever the sizes of the steps."""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest

from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from tests.runtime.oracle import LLAMA, MODELS

pytestmark = pytest.mark.gpu


def served_compilations(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The Triton kernels that are compiled, or loaded, while requests of many lengths are served."""
    from triton.runtime.jit import JITFunction

    compiled: list[str] = []
    compile_one: Any = JITFunction._do_compile

    def counted(function: Any, *arguments: Any, **named: Any) -> Any:
        compiled.append(function.fn.__name__)
        return compile_one(function, *arguments, **named)

    monkeypatch.setattr(JITFunction, "_do_compile", counted)
    draw = random.Random(0)
    for count in (1, 2, 3, 30):
        lengths = [draw.randrange(1, 120) for _ in range(count)]
        prompts = [[draw.randrange(5, 200) for _ in range(length)] for length in lengths]
        params = [
            SamplingParams(max_tokens=draw.randrange(1, 30), temperature=draw.choice((0, 0.8)), top_p=0.9)
            for _ in range(count)
        ]
        llm.generate(prompts, params)
    return compiled


@pytest.mark.parametrize("warm", ["auto", "off"], ids=["by default", "planted: off"])
def test_nothing_is_compiled_while_serving(
    warm: Literal["auto", "off"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a call of `warm_up`. What one has compiled the other would find: each has a dtype of its own."""
    dtype = "bf16" if warm == "auto" else "fp16"
    sizes = {"num_blocks": 512, "max_seqs": 32, "max_batch_tokens": 512}
    llm = LLM(MODELS / LLAMA, dtype=dtype, device="cuda", warm=warm, **sizes)
    assert (llm.engine.warmed is None) == (warm == "off")
    compiled = served_compilations(llm, monkeypatch)
    assert (compiled == []) == (warm == "auto"), compiled
    assert llm.engine.status().late_kernels == 0
