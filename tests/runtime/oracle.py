"""transformers as the oracle, and the rule for comparing token ids with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
LLAMA, DEEPSEEK = "docs-llama", "docs-deepseek"
NAMES = (LLAMA, DEEPSEEK)
ARCHITECTURES = {LLAMA: "LlamaForCausalLM", DEEPSEEK: "DeepseekV3ForCausalLM"}
LOGIT_GAP, ROUTER_GAP = 1e-4, 1e-5


@cache
def eval_tokens() -> list[int]:
    """Returns the held-out ids."""
    data = (MODELS / "eval_tokens.u16").read_bytes()
    return torch.frombuffer(bytearray(data), dtype=torch.uint16).to(torch.int64).tolist()


def window(index: int, size: int = 512) -> list[int]:
    """Returns one of the contiguous windows of the held-out ids."""
    return eval_tokens()[index * size : (index + 1) * size]


def prompts() -> list[list[int]]:
    """Returns twenty prompts from all over the held-out text: 18 of 3 to 88 ids, two longer than any chunk."""
    lengths = [*range(3, 93, 5), 521, 650]
    return [eval_tokens()[1000 + 977 * i :][:length] for i, length in enumerate(lengths)]


def load(directory: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """Loads the model of a directory with transformers, on the CPU."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


@cache
def oracle(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Returns an example model of transformers."""
    return load(MODELS / name, dtype)


@torch.no_grad()
def logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Returns float32 logits [len(ids), vocab] on the CPU, computed where the model is and in its dtype."""
    return model(torch.tensor([list(ids)], device=model.device)).logits[0].float().cpu()


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest difference, relative to the largest of the expected values, which are on the CPU."""
    return float((actual.cpu() - expected).abs().max() / expected.abs().max())


def excess(actual: torch.Tensor, theirs: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the mean square of an error as a multiple of that of transformers' result in the same dtype."""
    own = (actual.float().cpu() - expected).square().mean()
    return float(own / (theirs.float().cpu() - expected).square().mean())


@cache
def window_logits(name: str, index: int) -> torch.Tensor:
    """Returns float32 logits of an example model on one window of 512 ids; computed once."""
    return logits(oracle(name), window(index))


def losses(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Returns the negative log-likelihood of each id but the first, in nats, float64 [len(ids) - 1]."""
    return torch.nn.functional.cross_entropy(
        logits(model, ids)[:-1], torch.tensor(ids[1:]), reduction="none"
    ).double()


def loss(model: Any, ids: Sequence[int]) -> float:
    """Returns the mean of `losses`."""
    return float(losses(model, ids).mean())


@contextmanager
def router_gaps(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collects per call and MoE layer how close each token was to another choice of experts: [tokens]."""
    gaps: list[torch.Tensor] = []

    def look(module: Any, _: Any, output: Any) -> None:
        choice = output[0].float().sigmoid() + module.e_score_correction_bias
        groups = choice.view(len(choice), module.num_group, -1)
        best = groups.topk(2, -1).values.sum(-1).sort(-1, descending=True)
        gap = torch.full((len(choice),), torch.inf)
        if module.topk_group < module.num_group:
            gap = best.values[:, module.topk_group - 1] - best.values[:, module.topk_group]
        inside = torch.zeros_like(best.values).scatter_(1, best.indices[:, : module.topk_group], 1).bool()
        scores = (
            groups.masked_fill(~inside[..., None], -torch.inf).flatten(1).sort(-1, descending=True).values
        )
        gaps.append(torch.minimum(gap, scores[:, module.top_k - 1] - scores[:, module.top_k]))

    hooks = [
        m.register_forward_hook(look) for m in model.modules() if type(m).__name__ == "DeepseekV3TopkRouter"
    ]
    try:
        yield gaps
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class Answer:
    """The oracle's greedy answer to a prompt, with the margin of each id."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logit_gaps: tuple[float, ...]
    router_gaps: tuple[float, ...]  # the smallest up to and including each position


@cache
def answer(name: str, prompt: tuple[int, ...], ids: tuple[int, ...], count: int = 64) -> Answer:
    """Returns transformers' greedy answer of an example model, as far as `ids` follow it; computed once."""
    return answer_along(oracle(name), prompt, ids, count)


def answer_of(model: Any, prompt: Sequence[int], count: int) -> Answer:
    """Returns transformers' greedy answer of a model, `count` ids or up to its end token."""
    with torch.no_grad():
        out = model.generate(torch.tensor([[*prompt]]), max_new_tokens=count, do_sample=False, pad_token_id=2)
    ids = tuple(out[0, len(prompt) :].tolist())
    return replace(answer_along(model, prompt, ids, count), ids=ids)


def answer_along(model: Any, prompt: Sequence[int], ids: Sequence[int], count: int) -> Answer:
    """Returns what `answer_of` does, up to and including the first id that differs from `ids`, by one forward pass instead of one per id.

    What follows that id is the choice after the wrong beginning; a `Comparison` does not look at it.
    """
    with router_gaps(model) as gaps:
        rows = logits(model, [*prompt, *ids])[len(prompt) - 1 :][:count]
    chosen, ends = rows.argmax(-1).tolist(), model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    length = next((place + 1 for place, token in enumerate(chosen) if token in ends), len(chosen))
    top = rows.topk(2, -1).values
    nearest = torch.full((len(rows),), torch.inf)
    if gaps:
        nearest = torch.stack(gaps).amin(0).cummin(0).values[len(prompt) - 1 :]
    return Answer(
        tuple(prompt),
        tuple(chosen[:length]),
        tuple((top[:, 0] - top[:, 1]).tolist()),
        tuple(nearest.tolist()),
    )


@dataclass
class Comparison:
    """Compares ids up to the first difference, which is excused only where the oracle itself was undecided.

    Excuses are printed; `finish` allows one in 1,000 positions.
    """

    what: str
    positions: int = 0
    excuses: list[str] = field(default_factory=list)

    def add(self, ids: Sequence[int], expected: Answer) -> None:
        """Compares one answer. Raises AssertionError if it differs where the oracle was certain."""
        for place, (actual_id, expected_id) in enumerate(zip(ids, expected.ids, strict=False)):
            self.positions += 1
            if actual_id == expected_id:
                continue
            logit_gap, router_gap = expected.logit_gaps[place], expected.router_gaps[place]
            text = f"{self.what}: position {place}: {actual_id}, oracle {expected_id}, logit gap {logit_gap:.2e}, router gap {router_gap:.2e}"
            assert logit_gap < LOGIT_GAP or router_gap < ROUTER_GAP, text
            print("excused:", text)
            self.excuses.append(text)
            return
        assert len(ids) == len(expected.ids), f"{self.what}: {len(ids)} ids, oracle {len(expected.ids)}"

    def finish(self) -> None:
        """Raises AssertionError if too many differences were excused, or if nothing was compared."""
        assert self.positions > 0
        assert 1000 * len(self.excuses) <= self.positions, (
            f"{len(self.excuses)} excuses in {self.positions} positions"
        )
