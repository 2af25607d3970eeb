"""Log-probabilities in the shapes of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gristmill.runtime.completion import Chunk
from gristmill.runtime.scheduler import TokenLogprobs
from gristmill.serve.service import Service

LEAST = -9999.0
"""What stands for minus infinity, which JSON lacks."""


def chat_logprobs(service: Service, chunks: Iterable[Chunk]) -> dict[str, Any]:
    """``logprobs`` of a choice of a conversation."""
    texts = service.token_texts

    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = texts.bytes_of(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, LEAST), "bytes": list(raw)}

    content = [
        one(entry.token_id, entry.logprob) | {"top_logprobs": [one(*candidate) for candidate in entry.top]}
        for chunk in chunks
        for entry in chunk.logprobs or ()
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    service: Service, entries: Sequence[TokenLogprobs | None], ids: Sequence[int], offsets: Sequence[int]
) -> dict[str, Any]:
    """``logprobs`` of a choice of /v1/completions. `entries` of the token ids, None = unknown; `offsets` in the text."""
    texts = service.token_texts
    return {
        "tokens": [texts.name_of(token) for token in ids],
        "token_logprobs": [None if one is None else max(one.logprob, LEAST) for one in entries],
        "top_logprobs": [
            None
            if one is None
            else {
                texts.name_of(token): max(logprob, LEAST)
                for token, logprob in (*one.top, (one.token_id, one.logprob))
            }
            for one in entries
        ],
        "text_offset": offsets,
    }


def prompt_logprobs(service: Service, chunks: Sequence[Chunk]) -> list[Any] | None:
    """vLLM's ``prompt_logprobs``: for each token of the prompt the candidates by id; None = not asked for."""
    entries = next((chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None), None)
    if entries is None:
        return None
    texts = service.token_texts
    rows: list[Any] = []
    for entry in entries:
        if entry is None:
            rows.append(None)
            continue
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)]
        ranked.append((entry.token_id, entry.logprob, entry.rank))
        rows.append(
            {
                str(token): {
                    "logprob": max(logprob, LEAST),
                    "rank": rank,
                    "decoded_token": texts.text_of(token),
                }
                for token, logprob, rank in ranked
            }
        )
    return rows
