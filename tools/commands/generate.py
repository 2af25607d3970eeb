"""gristmill generate: a text continued."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from gristmill import console
from gristmill.tools.model_command import SamplingCommand, load_llm, model_option

if TYPE_CHECKING:
    from gristmill.runtime.llm import LLM


@click.command(cls=SamplingCommand)
@model_option
@click.option("--prompt", required=True, metavar="TEXT", help="Text to continue.")
@click.option(
    "--params",
    "params_file",
    metavar="FILE",
    help="JSON object of sampling parameters, by the names of SamplingParams; options override it.",
)
@click.option(
    "--stats",
    is_flag=True,
    help="Print counts of the engine: of --speculate, drafts and their acceptance; of --kv-transfer, blocks.",
)
@click.option(
    "--explain",
    is_flag=True,
    help="Print which kernel each operation ran, and why; which steps ran as CUDA graphs.",
)
@click.option(
    "--drain-seconds",
    type=float,
    default=0.0,
    show_default=True,
    metavar="S",
    help="Seconds that generation continues after SIGTERM; then it ends with the text so far.",
)
@click.option("--json", "as_json", is_flag=True, help="Only JSON on stdout, at the end.")
def generate(
    prompt: str,
    params_file: str | None,
    drain_seconds: float,
    stats: bool,
    explain: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Continue a text. The text is streamed to stdout, or printed at the end where --n asks for several; timings go to stderr.

    Sampling follows the options and --params. Of the model's generation_config.json only the end tokens are used.

    \b
    With --json, one object: {"prompt", "text", "token_ids", "finish_reason" ("stop", "length", "abort" or "error"), "error" (null, or
    the cause of "error": {"code", "message"}), "logprobs" (null without --logprobs: {"token_id", "logprob", "rank", "top"}), all of
    the first completion; "choices" (these five of each), "prompt_logprobs" (null without the option), "prompt_tokens", "seconds",
    "tokens_per_second", "weight_bytes", "explain" (rows with --explain, else null), "decode_graphs"
    (likewise: {"seqs", "tokens_per_seq", "max_ctx", "captured", "bytes", "steps", "reason"}), "speculation" (null without
    --speculate: {"method", "drafts", "draft_tokens", "accepted_tokens", "accepted_by_position", "reasons", "gains", "draft_bytes"}),
    "kv_transfer" (null without --kv-transfer: {"stores", "queried_tokens", "loaded_tokens", "loaded_blocks", "saved_blocks",
    "loaded_bytes", "saved_bytes", "loading", "saving", "answers", "failures"})}
    """
    from gristmill.runtime.completion import GrowingCompletion
    from gristmill.runtime.errors import UsageError
    from gristmill.runtime.sampling_params import SamplingParams, is_seconds
    from gristmill.tools.declared_options import given, params_of
    from gristmill.tools.reports import print_drafts, print_kernels, print_transfer

    if not is_seconds(drain_seconds):
        raise UsageError(f"--drain-seconds must be seconds, at least 0, got {drain_seconds}")
    params = params_of(params_file, given(SamplingParams, options))
    llm = load_llm(options, as_json, text=True, warm="off")
    begin = time.perf_counter()
    growing = [GrowingCompletion() for _ in range(params.n)]
    with _draining(llm, drain_seconds):
        for chunk in llm.stream(prompt, params):
            growing[chunk.choice].add(chunk)
            if not as_json and params.n == 1:
                click.echo(chunk.text, nl=False)
    seconds = time.perf_counter() - begin
    prompt_ids = llm.tokenizer.encode(prompt)
    completions = [one.completion(prompt_ids) for one in growing]
    tokens = sum(len(one.token_ids) for one in completions)
    rows, graphs = (llm.explain(), llm.explain_graphs()) if explain else (None, None)
    llm.engine.flush_kv_transfer()
    status = llm.engine.status()
    speculation, transfer = status.speculation, status.kv_transfer
    if as_json:
        choices = [
            {name: asdict(one)[name] for name in ("text", "token_ids", "finish_reason", "error", "logprobs")}
            for one in completions
        ]
        console.emit(
            {
                "prompt": prompt,
                **choices[0],
                "choices": choices,
                "prompt_logprobs": asdict(completions[0])["prompt_logprobs"],
                "prompt_tokens": len(prompt_ids),
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
                "weight_bytes": llm.weight_bytes,
                "explain": rows,
                "decode_graphs": graphs,
                "speculation": None if speculation is None else asdict(speculation),
                "kv_transfer": None if transfer is None else asdict(transfer),
            }
        )
        return
    if params.n > 1:
        for one in completions:
            click.echo(f"[{one.choice}] {one.text}")
    else:
        click.echo()
    ends = ", ".join(f"{one.finish_reason}{f' ({one.error})' if one.error else ''}" for one in completions)
    console.err().print(
        f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds:.1f}/s), finish: {ends}", style="dim"
    )
    if stats:
        print_drafts(speculation)
        print_transfer(transfer)
    if rows is not None:
        print_kernels(rows)
    if graphs:
        console.table(
            "Decode steps",
            [
                "requests up to",
                "tokens each",
                "context up to",
                "CUDA graph",
                "MB",
                "steps",
                "why not",
            ],
            [
                [
                    r["seqs"] or "",
                    r["tokens_per_seq"] or "",
                    r["max_ctx"] or "",
                    "yes" if r["captured"] else "no",
                    f"{r['bytes'] / 1e6:.1f}" if r["captured"] else "",
                    r["steps"],
                    r["reason"],
                ]
                for r in graphs
            ],
            right=("requests up to", "tokens each", "context up to", "MB", "steps"),
        )


@contextmanager
def _draining(llm: LLM, seconds: float) -> Iterator[None]:
    """Drain the engine on SIGTERM while the block runs."""
    before = signal.signal(signal.SIGTERM, lambda *_: llm.drain(seconds))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
