"""Grammars of structured output, by llguidance: which tokens may come next.

A grammar bars, before each token is sampled, the tokens that cannot go on (Willard and Louf, 2023, arXiv:2307.09702; llguidance computes
the mask from the parser's state at every step, so nothing is prepared for each grammar).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gristmill.runtime.errors import UsageError
from gristmill.runtime.grammar_parts import parse_tags, quoted, resolve_parts, tag_grammar
from gristmill.runtime.structured_output import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


TOKEN_S, MOST_DEBT_S = 1e-3, 0.1
"""Processor time of the parser for a token, and how far a grammar may be beyond that. A token takes some microseconds; of a grammar with ever more
ways to read the same text, such as ``s: s s | "a"``, the square of the text's length: a second after some hundred tokens, with the mask, for which
every other request waits."""


class Grammar:
    """The state of one output within its grammar. A mask of the vocabulary has `words` int32 words."""

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self.matcher = matcher
        self.words = words
        self._debt = 0.0  # seconds

    def copies(self, count: int) -> list[Grammar]:
        """This one, and others in the same state: for `count` completions of one prompt."""
        others = [Grammar(self.matcher.deep_copy(), self.words) for _ in range(count - 1)]
        return [self, *others]

    def consume(self, tokens: Sequence[int]) -> None:
        """These tokens were sampled."""
        begin = time.thread_time()
        self.matcher.consume_tokens(list(tokens))
        taken = time.thread_time() - begin
        if self._debt <= MOST_DEBT_S:
            self._debt = max(0.0, self._debt + taken - TOKEN_S * len(tokens))

    def allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may come next, one after another. Changes nothing."""
        return 0 if self.failed else int(self.matcher.validate_tokens(list(tokens)))

    @property
    def failed(self) -> bool:
        """Whether it cannot go on: a limit of the parser was reached, it takes too long, or a token came that it had barred."""
        return self._debt > MOST_DEBT_S or bool(self.matcher.is_error())

    @property
    def error(self) -> str:
        """Why it cannot go on; empty if it can."""
        if self._debt > MOST_DEBT_S and not self.matcher.is_error():
            return (
                f"the grammar is too ambiguous: to read what was written takes more than {1e3 * TOKEN_S:g} ms for each token. Let a text have one "
                "derivation: write a list as item*, or left-recursive (list: list item | item), and no rule twice around the same text"
            )
        return _reason(self.matcher)


class HostGrammar(Grammar):
    """The grammar of a host that follows the output by itself.

    Attributes:
        mask: which tokens may come next, as of `next_tokens`: int32 [1 + drafts, words] of the step that is about to be completed; None = all.
    """

    failed, error = False, ""

    def __init__(self) -> None:
        self.mask: Tensor | None = None

    def consume(self, tokens: Sequence[int]) -> None:
        """The host knows them."""


class GrammarCompiler:
    """Makes grammars for the tokens of one model.

    Args:
        tokenizer_json: the model's tokenizer.json.
        vocab_size: tokens of its logits.
        eos_ids: the tokens that end an output.

    Raises:
        UsageError: llguidance is missing or cannot read the tokenizer; the model has no end token.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise UsageError(
                "structured output needs llguidance: pip install 'gristmill[structured]', or llguidance"
            ) from error
        if not eos_ids:
            raise UsageError(
                "structured output needs a model with an end token; this one's config.json names none"
            )
        try:
            self._tokenizer = llguidance.LLTokenizer(
                tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_ids)
            )
        except Exception as error:  # llguidance raises its own and Rust's
            raise UsageError(f"llguidance cannot read the model's tokenizer: {error}") from error
        added = json.loads(tokenizer_json).get("added_tokens", ())
        self._added = {
            token["content"]: int(token["id"])
            for token in added
            if self._tokenizer.is_special_token(token["id"])
        }
        self._matcher = llguidance.LLMatcher
        # Verbose errors have the parser's state behind them, with a kilobyte and more of counters.
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._words = (vocab_size + 31) // 32

    def compile(self, output: StructuredOutput) -> Grammar:
        """The grammar of an output that has not begun; UsageError says what is wrong with it. May take seconds, in which other threads run."""
        matcher = self._matcher
        try:
            if output.json_schema is not None:
                schema = output.json_schema
                text = matcher.grammar_from_json_schema(schema if isinstance(schema, str) else dict(schema))
            elif output.regex is not None:
                text = matcher.grammar_from_regex(output.regex)
            elif output.grammar is not None:
                text = matcher.grammar_from_lark(resolve_parts(output.grammar, self._added))
            elif output.structural_tag is not None:
                text = matcher.grammar_from_lark(
                    resolve_parts(tag_grammar(parse_tags(output.structural_tag), self._added), self._added)
                )
            else:
                # One terminal: as a rule, each option would be an item of the parser, which takes some hundreds.
                options = " | ".join(map(quoted, output.choice or ()))
                text = matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {options}")
        except ValueError as error:
            raise UsageError(f"the structured output cannot be compiled: {error}") from error
        compiled = matcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if not compiled.is_error():
            # The first mask builds the lexer of all terminals, or finds that it is too large. In a step every other request would wait for it.
            compiled.compute_bitmask()
        if compiled.is_error():
            raise UsageError(f"the structured output cannot be compiled: {_reason(compiled)}")
        return Grammar(compiled, self._words)


def _reason(matcher: LLMatcher) -> str:
    """Why a matcher cannot go on, in llguidance's words, unless these say nothing to its user."""
    error = str(matcher.get_error()).removesuffix("\n<non-verbose/>")
    return "nothing matches it: no token can come next" if error == "NoExtensionBias" else error


def next_tokens(grammars: Sequence[Grammar], drafts: Sequence[Sequence[int]], pinned: bool) -> Tensor:
    """Which tokens may come next: int32 [rows, words] on the host, bit i of word w for token 32 w + i.

    Grammars do not change. The rows of a grammar that failed are empty: its request ends with an
    error. So are rows after a draft that is not allowed, which is never accepted.

    Args:
        drafts: for each grammar, tokens that may come; it has a row for the state before them and one after each of them.
    """
    from llguidance.numpy import fill_next_token_bitmask_par_with_draft_tokens

    rows = [0, *accumulate(1 + len(tokens) for tokens in drafts)]
    mask = _masks(rows[-1], grammars[0].words, 0, pinned)
    sound = [
        (grammar.matcher, row, list(tokens))
        for grammar, row, tokens in zip(grammars, rows, drafts, strict=False)
        if not grammar.failed
    ]
    # In copies: a limit of the parser that only a wrong draft reaches must not fail the request.
    drafted = [(matcher.deep_copy(), row, tokens) for matcher, row, tokens in sound if tokens]
    if drafted:
        fill_next_token_bitmask_par_with_draft_tokens(_threads(), drafted, mask.numpy())
    unclear = {row for copy, row, _ in drafted if copy.is_error()}
    plain = [(matcher, row) for matcher, row, tokens in sound if not tokens or row in unclear]
    for row, tokens in zip(rows, drafts, strict=False):
        if row in unclear:
            mask[row : row + 1 + len(tokens)] = 0
    _fill(plain, mask)
    for matcher, row in plain:
        if matcher.is_error():  # in computing its mask
            mask[row] = 0
    return mask


def given_tokens(
    grammars: Sequence[HostGrammar], rows: Sequence[int], vocab_size: int, pinned: bool
) -> Tensor:
    """As `next_tokens`, with as many rows for each grammar, of what their host has computed."""
    mask = _masks(sum(rows), (vocab_size + 31) // 32, -1, pinned)
    for grammar, part in zip(grammars, mask.split(list(rows)), strict=True):
        if grammar.mask is not None:
            part.copy_(grammar.mask)
    return mask


def _masks(rows: int, words: int, value: int, pinned: bool) -> Tensor:
    """int32 [rows, words] of a value, on the host. torch would fill it by all cores, which stay busy for some milliseconds after it."""
    mask = torch.empty(rows, words, dtype=torch.int32, pin_memory=pinned)
    mask.numpy().fill(value)
    return mask


ALONE_S = 5e-4
"""How long one thread computes masks before others help it."""
MOST_THREADS = 8


def _fill(plain: Sequence[tuple[LLMatcher, int]], mask: Tensor) -> None:
    """Compute the masks of these matchers into these rows.

    Most masks take some microseconds, and the threads of a pool keep their cores busy for much longer than that: one tenth of 256 requests with
    schemas cost a third of all tokens per second with a pool of all cores (docs/performance/engine.md).
    """
    from llguidance.numpy import fill_next_token_bitmask_par

    first, size, begin = mask.data_ptr(), mask.element_size() * mask.shape[1], time.perf_counter()
    for done, (matcher, row) in enumerate(plain):
        if time.perf_counter() - begin > ALONE_S:
            fill_next_token_bitmask_par(_threads(), list(plain[done:]), mask.numpy())
            return
        # What llguidance.numpy.fill_next_token_bitmask calls, which checks the array for four times as long.
        matcher.unsafe_compute_mask_ptr(first + row * size, size)


@cache
def _threads() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor(num_threads=min(MOST_THREADS, len(os.sched_getaffinity(0))))
