"""gristmill eval: perplexity on a file of token ids."""

from __future__ import annotations

from typing import Any

import click

from gristmill import console
from gristmill.tools.commands.bar import bar
from gristmill.tools.model_command import ModelCommand, load_llm, model_option


@click.command(name="eval", cls=ModelCommand)
@model_option
@click.option(
    "--tokens", "tokens_file", required=True, metavar="FILE", help="Token ids, little-endian uint16."
)
@click.option("--window", type=int, default=1024, show_default=True, metavar="N", help="Tokens per window.")
@click.option(
    "--windows",
    type=int,
    default=96,
    show_default=True,
    metavar="N",
    help="Windows, contiguous from token 0.",
)
@click.option("--json", "as_json", is_flag=True, help="Only JSON on stdout.")
def evaluate(tokens_file: str, window: int, windows: int, as_json: bool, **options: Any) -> None:
    """Perplexity of a model on a file of token ids: how well it predicts each token from those before it.

    Each window is evaluated separately; all its tokens but the first are predicted. Loss is in nats per token.

    \b
    With --json, one object: {"loss", "perplexity", "tokens", "seconds"}; tokens = windows x (window - 1)
    """
    from gristmill.tools.evaluate import evaluate as run
    from gristmill.tools.evaluate import read_tokens

    tokens = read_tokens(tokens_file)
    model, quant = options["model"], options["quant"] or "as stored"
    llm = load_llm(options, as_json, max_batch_tokens=max(2048, window), warm="off")
    with bar("evaluating", as_json) as advance:
        evaluation = run(llm.engine, tokens, window, windows, advance)
    if as_json:
        console.emit(
            {name: getattr(evaluation, name) for name in ("loss", "perplexity", "tokens", "seconds")}
        )
        return
    console.table(
        f"{model} ({quant}) on {tokens_file}",
        ["loss (nats/token)", "perplexity", "tokens", "seconds"],
        [
            [
                f"{evaluation.loss:.4f}",
                f"{evaluation.perplexity:.3f}",
                f"{evaluation.tokens:,}",
                f"{evaluation.seconds:.1f}",
            ]
        ],
        right=("loss (nats/token)", "perplexity", "tokens", "seconds"),
    )
