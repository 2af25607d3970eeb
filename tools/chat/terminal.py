"""The terminal: lines with history, answers as they come, Ctrl-C that ends an answer and nothing else."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from gristmill.kernel_registry.policy import default_cache
from gristmill.runtime.errors import UsageError
from gristmill.tools.chat.session import Answer, Session
from gristmill.tools.chat.slash import COMMANDS, Again, Leave, run_slash

PROMPT, MORE = "> ", ". "
QUOTES = '"""'
LINES = 1000
"""Lines of history that are kept."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def converse(session: Session) -> None:
    """Questions of a person, until /quit or the end of input."""
    with _line_editing():
        while True:
            try:
                text, quoted = read_question()
                if text.startswith("/") and not quoted:
                    _obey(session, text)
                elif text.strip():
                    show_answer(session, text)
            except KeyboardInterrupt:
                print()
            except EOFError:
                print()
                return
            except Leave:
                return
            except UsageError as error:
                _say(str(error))


def _obey(session: Session, line: str) -> None:
    before = session.messages
    try:
        run_slash(session, line, _say)
    except Again as again:
        shorter = session.messages
        try:
            show_answer(session, again.question)
        finally:
            if session.messages is shorter:  # no new answer: the former one stays
                session.messages = before


def _input(prompt: str) -> str:
    """A line; the prompt is no part of stdout where that is a file."""
    if sys.stdout.isatty():
        return input(prompt)
    sys.stderr.write(prompt)
    sys.stderr.flush()
    return input()


def read_question(read: Callable[[str], str] = _input) -> tuple[str, bool]:
    """A question, and whether it was quoted: a line; several, of which each but the last ends with a backslash; or what is between triple
    quotes, as it is."""
    line = read(PROMPT)
    if line.lstrip().startswith(QUOTES):
        text = line.lstrip().removeprefix(QUOTES)
        while not text.rstrip().endswith(QUOTES):
            text += "\n" + read(MORE)
        return text.rstrip().removesuffix(QUOTES).strip("\n"), True
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read(MORE))
    return "\n".join(lines), False


def show_answer(session: Session, question: str) -> str | None:
    """Ask, and print the answer as it comes: thoughts dimmed, tool calls and why it ended on lines of their own. Its finish_reason."""
    answer = Answer()
    dim, plain = ("\x1b[2m", "\x1b[0m") if _colors() else ("", "")
    thinking = False
    try:
        with interruptible() as stopped:
            for delta in session.ask(question, answer, stopped):
                if delta.reasoning:
                    _write(("" if thinking else dim) + printable(delta.reasoning))
                    thinking = True
                if delta.content:
                    if thinking:
                        _write(plain + "\n\n")
                        thinking = False
                    _write(printable(delta.content))
    finally:
        _write(plain if thinking else "")
    print()
    for call in answer.calls:
        _say(f"calls {printable(call.name)}({printable(call.arguments)})")
    if answer.finish_reason == "error":
        _say(f"no answer: {answer.error}")
    elif answer.finish_reason == "length":
        _say(
            "cut at max_tokens"
            if "max_tokens" in session.stated
            else "cut: the model takes no more; /clear or /undo makes room"
        )
    elif answer.finish_reason == "interrupted":
        _say("interrupted")
    return answer.finish_reason


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """SIGINT sets a flag in this block, so that no step of the engine is cut in the middle; a second one interrupts as usual."""
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if stopped:
            raise KeyboardInterrupt
        stopped = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: stopped
    finally:
        signal.signal(signal.SIGINT, before)


def printable(text: str) -> str:
    """Text of a model without what a terminal would obey."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(text: str) -> None:
    """What is no answer goes to stderr."""
    dim, plain = ("\x1b[2m", "\x1b[0m") if _colors() else ("", "")
    sys.stdout.flush()
    print(f"{dim}{text}{plain}", file=sys.stderr, flush=True)


def _colors() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@contextmanager
def _line_editing() -> Iterator[None]:
    """Editing, completion of commands and history, in a file of the cache."""
    try:
        import readline
    except ImportError:  # a Python without it
        yield
        return

    def complete(text: str, state: int) -> str | None:
        line = readline.get_line_buffer()
        found = [f"/{name} " for name in COMMANDS if line.startswith("/") and f"/{name}".startswith(line)]
        return found[state] if state < len(found) else None

    file = default_cache() / "chat_history"
    readline.set_completer_delims("\n")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")
    readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one question
    with suppress(OSError):  # none yet
        readline.read_history_file(file)
    try:
        yield
    finally:
        readline.set_history_length(LINES)
        try:
            _private(file)
            readline.write_history_file(file)
        except OSError as error:
            _say(f"the history is not kept: {file}: {error.strerror or error}")


def _private(file: Path) -> None:
    """A file that nobody else reads."""
    file.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
