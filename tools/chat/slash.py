"""The slash commands: what a line that begins with / does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gristmill.runtime.errors import UsageError
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.tools.chat.session import Session


class Leave(Exception):
    """The conversation is over."""


@dataclass(frozen=True)
class Again(Exception):
    """A question is to be asked again."""

    question: str


@dataclass(frozen=True)
class Slash:
    """A command: what it takes, what it does, and the function that does it, with what stands behind its name."""

    takes: str
    does: str
    run: Callable[[Session, str, Callable[[str], None]], None]


def _help(session: Session, rest: str, say: Callable[[str], None]) -> None:
    for name, command in COMMANDS.items():
        say(f"/{name} {command.takes}".ljust(24) + command.does)
    say(
        'Several lines: end each with \\, or begin with """ and end with """. Ctrl-C ends an answer, Ctrl-D leaves.'
    )


def _system(session: Session, rest: str, say: Callable[[str], None]) -> None:
    if rest:
        session.system = "" if rest == "-" else rest
    say(session.system or "no system message")


def _set(session: Session, rest: str, say: Callable[[str], None]) -> None:
    name, _, text = rest.replace("=", " ", 1).partition(" ")
    if not name:
        raise UsageError(
            "/set NAME VALUE, as /set temperature 0.7; /set NAME takes the default; /params lists them"
        )
    text = text.strip()
    session.set(name.replace("-", "_"), None if text in ("", "null") else _value(text))
    say(f"{name} = {asdict(SamplingParams.of(session.stated))[name.replace('-', '_')]!r}")


def _value(text: str) -> Any:
    """JSON, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _params(session: Session, rest: str, say: Callable[[str], None]) -> None:
    now = SamplingParams.of(session.stated)
    for one in fields(SamplingParams):
        value = getattr(now, one.name)
        if one.name == "max_tokens" and "max_tokens" not in session.stated:
            value = "what there is room for"
        say(
            f"{'*' if one.name in session.stated else ' '} {one.name:28}{value!r}"
            if not isinstance(value, str)
            else f"  {one.name:28}{value}"
        )


def _clear(session: Session, rest: str, say: Callable[[str], None]) -> None:
    session.messages = []
    say("the conversation is empty" + (", but for the system message" if session.system else ""))


def _undo(session: Session, rest: str, say: Callable[[str], None]) -> None:
    question = session.undo()
    say("there is nothing to take back" if question is None else f"taken back: {question}")


def _retry(session: Session, rest: str, say: Callable[[str], None]) -> None:
    question = session.undo()
    if question is None:
        raise UsageError("there is no question to ask again")
    raise Again(question)


def _save(session: Session, rest: str, say: Callable[[str], None]) -> None:
    path = _path("save", rest)
    session.save(path)
    say(f"{len(session.messages)} messages in {path}")


def _load(session: Session, rest: str, say: Callable[[str], None]) -> None:
    path = _path("load", rest)
    session.load(path)
    say(f"{len(session.messages)} messages of {path}")


def _path(name: str, rest: str) -> Path:
    if not rest:
        raise UsageError(f"/{name} needs a file")
    return Path(rest).expanduser()


def _explain(session: Session, rest: str, say: Callable[[str], None]) -> None:
    from gristmill.tools.reports import print_kernels

    print_kernels(session.llm.explain())


def _quit(session: Session, rest: str, say: Callable[[str], None]) -> None:
    raise Leave


COMMANDS = {
    "help": Slash("", "show this", _help),
    "system": Slash("[TEXT|-]", "set the system message, or remove it (-); without TEXT, show it", _system),
    "set": Slash("NAME [VALUE]", "set a sampling parameter; without VALUE, its default", _set),
    "params": Slash("", "show the sampling parameters; * = not the default", _params),
    "clear": Slash("", "forget the conversation", _clear),
    "undo": Slash("", "take back the last question and its answer", _undo),
    "retry": Slash("", "ask the last question again", _retry),
    "save": Slash("FILE", "write the conversation as JSON", _save),
    "load": Slash("FILE", "read one, or a list of OpenAI's messages", _load),
    "explain": Slash("", "show which kernels have run, and why", _explain),
    "quit": Slash("", "leave", _quit),
}


def run_slash(session: Session, line: str, say: Callable[[str], None]) -> None:
    """Run a line that begins with /.

    Raises:
        UsageError: no such command, or a mistake in what stands behind it. Leave, Again.
    """
    name, _, rest = line[1:].partition(" ")
    command = COMMANDS.get(name) or COMMANDS.get({"exit": "quit", "?": "help", "q": "quit"}.get(name, ""))
    if command is None:
        near = get_close_matches(name, COMMANDS, 1)
        raise UsageError(
            f"there is no /{name}; " + (f"did you mean /{near[0]}?" if near else "/help lists what there is")
        )
    command.run(session, rest.strip(), say)
