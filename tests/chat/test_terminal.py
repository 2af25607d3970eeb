"""`gristmill chat`: a conversation over a scripted model, and the real command in a terminal and over a pipe."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from gristmill.runtime.chat.conversation import CallDelta, ChatOptions, Delta, Message
from gristmill.runtime.completion import Chunk
from gristmill.runtime.errors import INVALID_LOGITS, UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.tools.chat import command, terminal
from gristmill.tools.chat.session import Answer, Session, recommended
from gristmill.tools.chat.slash import Again, Leave, run_slash
from gristmill.tools.chat.terminal import interruptible, read_question, show_answer
from gristmill.tools.cli import cli
from tests import forked
from tests.runtime.oracle import LLAMA, MODELS

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "models" / "docs-llama"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


PROGRAM = (
    "from gristmill import console; from gristmill.tools.chat.command import chat; console.run(chat, 'chat')"
)


class Scripted:
    """A model and its `Chat` in one: each answer is a list of deltas, one per step."""

    def __init__(self, *answers: Sequence[Delta], finish: str = "stop", capacity: int = 100) -> None:
        self.answers, self.finish = [*answers], finish
        self.asked: list[tuple[list[Message], SamplingParams]] = []
        self.closed = 0
        config = SimpleNamespace(capacity=capacity)
        self.engine = SimpleNamespace(scheduler=SimpleNamespace(config=config))
        self._steps: list[Delta] = []

    def encode(self, messages: list[Message], options: ChatOptions) -> list[int]:
        self._messages = messages
        return [0] * (10 * len(messages))

    def reply(self, params: SamplingParams, options: ChatOptions, prompt: object) -> tuple[Any, Any]:
        return params, lambda: SimpleNamespace(
            push=lambda text, ids: self._steps.pop(0),
            finish=lambda: Delta(reasoning="" if self._steps else ""),
        )

    def stream(self, prompts: list[list[int]], params: SamplingParams) -> Iterator[Chunk]:
        self.asked.append((self._messages, params))
        self._steps = list(self.answers.pop(0))
        count = len(self._steps)
        try:
            for number in range(count):
                last = number == count - 1
                error = INVALID_LOGITS if last and self.finish == "error" else None
                yield Chunk(0, (number,), "?", self.finish if last else None, error=error)
        finally:
            self.closed += 1

    def explain(self) -> list[dict[str, Any]]:
        return []


def session_of(model: Scripted, **given: Any) -> Session:
    return Session(model, model, {}, given)  # type: ignore[arg-type]


def ask(session: Session, question: str, **options: Any) -> Answer:
    answer = Answer()
    for _ in session.ask(question, answer, **options):
        pass
    return answer


def say_nothing(text: str) -> None:
    """For commands whose words do not matter."""


# The conversation


def test_the_history_goes_along() -> None:
    model = Scripted([Delta("Par"), Delta("is")], [Delta("Rome")])
    session = session_of(model)
    session.system = "Be brief."
    answer = ask(session, "France?")
    assert (answer.content, answer.finish_reason, answer.output_tokens) == ("Paris", "stop", 2)
    ask(session, "Italy?")
    assert [(m.role, m.content) for m in model.asked[1][0]] == [
        ("system", "Be brief."), ("user", "France?"), ("assistant", "Paris"), ("user", "Italy?"),
    ]  # fmt: skip
    assert model.asked[1][1].max_tokens == 60  # what four messages leave of 100
    assert session.undo() == "Italy?" and [m.content for m in session.messages] == ["France?", "Paris"]
    assert session.undo() == "France?" and session.undo() is None


def test_thoughts_and_calls_are_kept() -> None:
    call = Delta(calls=[CallDelta(0, "{", "id1", "look")])
    model = Scripted(
        [Delta(reasoning="hm"), Delta("a"), call, Delta(calls=[CallDelta(0, "}")])], [Delta("b")]
    )
    session = session_of(model)
    answer = ask(session, "?")
    assert answer.reasoning == "hm" and [(c.id, c.name, c.arguments) for c in answer.calls] == [
        ("id1", "look", "{}")
    ]
    ask(session, "!")
    assert model.asked[1][0][1] == answer.message()


def test_an_interrupted_answer_stays_as_far_as_it_came() -> None:
    model = Scripted([Delta("one"), Delta(" two"), Delta(" three")], [Delta("", ""), Delta("x")])
    session = session_of(model)
    answer = Answer()
    steps = list(session.ask("count", answer, lambda: answer.content == "one"))
    assert answer.content == "one two" and answer.finish_reason == "interrupted" and len(steps) == 2
    assert model.closed == 1  # so the engine has no request left
    assert [m.content for m in session.messages] == ["count", "one two"]
    ask(session, "again", stopped=lambda: True)  # before there is any text
    assert [m.content for m in session.messages] == ["count", "one two"] and model.closed == 2


def test_a_failed_answer_leaves_the_conversation() -> None:
    session = session_of(Scripted([Delta("half"), Delta("")], finish="error"))
    answer = ask(session, "?")
    assert answer.finish_reason == "error" and "invalid_logits" in answer.error and session.messages == []


def test_a_conversation_that_is_too_long() -> None:
    model = Scripted([Delta("a")], [Delta("b")], capacity=30)
    session = session_of(model, max_tokens=50)
    ask(session, "?")
    assert model.asked[0][1].max_tokens == 20
    with pytest.raises(
        UsageError, match="has 30 tokens, and the model takes 30 .*: /undo or /clear makes room"
    ):
        ask(session, "?")
    assert len(session.messages) == 2


def test_what_a_model_recommends() -> None:
    assert recommended({"temperature": 0.6, "top_k": 20, "eos_token_id": 1}) == {
        "temperature": 0.6,
        "top_k": 20,
    }
    assert recommended({"do_sample": False, "temperature": 0.6}) == {"temperature": 0.0}
    assert recommended({}) == {"temperature": 0.7}
    session = Session(Scripted(), Scripted(), {"temperature": 0.6, "top_p": 0.9}, {"temperature": 1.0})  # type: ignore[arg-type]
    assert session.stated == {"temperature": 1.0, "top_p": 0.9}
    with pytest.raises(UsageError, match="n must be 1"):
        session_of(Scripted(), n=2)


# Slash commands


def test_set_takes_every_parameter() -> None:
    session, said = session_of(Scripted()), []
    for line, name, value in (
        ("/set temperature 0.2", "temperature", 0.2),
        ("/set top_k=5", "top_k", 5),
        ("/set max-tokens 7", "max_tokens", 7),
        ('/set stop ["a b", "c"]', "stop", ["a b", "c"]),
        ("/set ignore_eos true", "ignore_eos", True),
        ('/set logit_bias {"5": 1.5}', "logit_bias", {"5": 1.5}),
    ):
        run_slash(session, line, said.append)
        assert session.stated[name] == value, line
    assert said[0] == "temperature = 0.2"
    run_slash(session, "/params", said.append)
    assert any(line.startswith("* top_k ") for line in said) and any(
        line.startswith("  min_p ") for line in said
    )
    run_slash(session, "/set top_k", say_nothing)
    run_slash(session, "/set max_tokens null", say_nothing)
    assert "top_k" not in session.stated and "max_tokens" not in session.stated
    before = dict(session.stated)
    for line, message in (
        ("/set temperature -1", "temperature must be"),
        ("/set temperature warm", "temperature must be"),
        ("/set temprature 1", "temperature"),
        ("/set temprature", "temperature"),
        ("/set n 2", "n must be 1"),
        ("/set", "/set NAME VALUE"),
        ("/sytem x", "did you mean /system"),
        ("/xyz", "/help lists"),
        ("/save", "needs a file"),
        ("/load /absent", "cannot read /absent"),
        ("/save /absent/x", "cannot write /absent/x"),
        ("/retry", "no question"),
    ):
        with pytest.raises(UsageError, match=message):
            run_slash(session, line, say_nothing)
    assert session.stated == before


def test_commands_on_the_conversation(tmp_path: Path) -> None:
    session, said = session_of(Scripted([Delta("Päris \U0001f5fc", "thought")]), top_p=0.5), []
    ask(session, "Where?\nThere?")
    run_slash(session, "/system You are a guide.", say_nothing)
    run_slash(session, f"/save {tmp_path / 'a file.json'}", say_nothing)
    kept = list(session.messages)
    run_slash(session, "/clear", say_nothing)
    run_slash(session, "/system -", say_nothing)
    run_slash(session, "/set top_p", say_nothing)
    assert session.messages == [] and session.system == ""
    run_slash(session, f"/load {tmp_path / 'a file.json'}", say_nothing)
    assert (
        session.messages == kept and session.system == "You are a guide." and session.stated["top_p"] == 0.5
    )
    with pytest.raises(Again) as again:
        run_slash(session, "/retry", say_nothing)
    assert again.value.question == "Where?\nThere?" and session.messages == []
    with pytest.raises(Leave):
        run_slash(session, "/exit", say_nothing)
    run_slash(session, "/help", said.append)
    assert {line.split()[0] for line in said if line.startswith("/")} >= {
        "/help",
        "/set",
        "/explain",
        "/quit",
    }


@pytest.mark.parametrize(
    "text",
    ["{", "3", '{"messages": 3}', '[{"role": "user"}]', '[{"role": "tool", "content": "x"}]', '[{"role": "user", "content": ["x"]}]',
     '{"messages": [], "params": {"top_p": 3}}', '{"messages": [], "params": []}', '{"messages": [], "system": 3}'],
)  # fmt: skip
def test_a_file_that_is_no_conversation_changes_nothing(tmp_path: Path, text: str) -> None:
    session = session_of(Scripted([Delta("a")]))
    ask(session, "?")
    state = (list(session.messages), session.system, dict(session.stated))
    (tmp_path / "file").write_text(text)
    with pytest.raises(UsageError):
        session.load(tmp_path / "file")
    assert (session.messages, session.system, session.stated) == state
    (tmp_path / "file").write_text('[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]')
    session.load(tmp_path / "file")
    assert session.system == "s" and [m.content for m in session.messages] == ["u"]


# What is read and printed


def test_questions_of_several_lines() -> None:
    for typed, question in {
        ("one",): ("one", False),
        ("a\\", "b\\", "c"): ("a\nb\nc", False),
        ('"""a', "b", '  c"""'): ("a\nb\n  c", True),
        ('"""/etc is a path"""',): ("/etc is a path", True),
        ("  \u00e9",): ("  \u00e9", False),
    }.items():
        lines = iter(typed)
        assert read_question(lambda prompt, lines=lines: next(lines)) == question


def test_an_answer_as_it_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [
        Delta(reasoning="think\x1b[2J"),
        Delta("a\x07\x9b31m"),
        Delta("\u00e4\t\n", calls=[CallDelta(0, "{}", "i", "look")]),
    ]
    show_answer(session_of(Scripted(steps)), "?")
    out, err = capsys.readouterr()
    assert (
        out == "think\ufffd[2J\n\na\ufffd\ufffd31m\u00e4\t\n\n" and "calls look({})" in err
    )  # nothing that a terminal obeys
    monkeypatch.setattr(terminal, "_colors", lambda: True)
    show_answer(session_of(Scripted(steps)), "?")
    assert capsys.readouterr().out.startswith("\x1b[2mthink\ufffd[2J\x1b[0m\n\na")
    for finish, said in (("length", "the model takes no more"), ("error", "no answer: invalid_logits")):
        show_answer(session_of(Scripted([Delta("a")], finish=finish)), "?")
        assert said in capsys.readouterr().err


def test_the_first_interrupt_is_a_flag_and_the_second_one_is_not() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible() as stopped:
        assert not stopped()
        signal.raise_signal(signal.SIGINT)
        assert stopped()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


# The command


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A command line with a model that is not asked to make sense."""
    folder = tmp_path_factory.mktemp("chat")
    (folder / "template.jinja").write_text(CHATML)
    options = (
        "--chat-template",
        str(folder / "template.jinja"),
        "--device",
        "cpu",
        "--num-blocks",
        "64",
        "--warm",
        "off",
    )
    return (
        "-c",
        PROGRAM,
        str(MODEL),
        *options,
        "--dtype",
        "fp32",
        "--temperature",
        "0",
    )


@pytest.fixture
def environment(tmp_path: Path, policy_file) -> dict[str, str]:
    policy_file()
    return {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path),
        "TERM": "xterm",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def _as_a_shell_would() -> None:
    """Before a program begins: the terminal is its own, and Ctrl-C is not ignored, as what runs in the background inherits it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A process in a terminal of its own."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, *command], stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=ROOT, start_new_session=True,
            preexec_fn=_as_a_shell_would,
        )  # fmt: skip
        os.close(slave)
        self.seen, self._at = "", 0

    def send(self, text: str) -> None:
        """Type."""
        os.write(self._master, text.encode())

    def until(self, text: str, seconds: float = 120.0) -> None:
        """Read up to a text, after what was read before."""
        self._read(lambda: self.seen.find(text, self._at) + 1, seconds, text)
        self._at = self.seen.index(text, self._at) + len(text)

    def interrupt(self) -> None:
        """Ctrl-C until a prompt follows: Python does not see a signal that comes while readline takes a key."""
        for _ in range(5):
            time.sleep(1)
            self.send("\x03")
            try:
                self.until("> ", 10)
            except AssertionError:
                continue
            return
        self.until("> ")

    def more(self, count: int) -> None:
        """Read so many characters."""
        self._read(lambda: len(self.seen) >= self._at + count, 60.0, f"{count} characters")
        self._at = len(self.seen)

    def _read(self, enough: Callable[[], object], seconds: float, wanted: str) -> None:
        end = time.monotonic() + seconds
        while not enough():
            assert time.monotonic() < end, f"no {wanted!r} in {self.seen[self._at :]!r}"
            if select.select([self._master], [], [], 1.0)[0]:
                try:
                    data = os.read(self._master, 65536)
                except OSError as error:
                    raise AssertionError(f"it ended without {wanted!r}: {self.seen[self._at :]!r}") from error
                shown = re.sub(r"\x1b\[\??[0-9;]*[a-zA-Z]", "", data.decode(errors="replace"))
                self.seen += shown.replace("\r", "")

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def test_in_a_terminal(arguments: tuple[str, ...], environment: dict[str, str], tmp_path: Path) -> None:
    terminal = Terminal(arguments, environment)
    try:
        terminal.until("/help lists the commands")
        terminal.until("> ")
        terminal.send("/set max_tokens 4\n")
        terminal.until("max_tokens = 4")
        terminal.until("> ")
        terminal.send("The \\\n")
        terminal.until(". ")
        terminal.send("index\n")
        terminal.until("cut at max_tokens")
        terminal.until("> ")
        terminal.send("/set max_tokens\n")
        terminal.until("max_tokens = 128")
        terminal.until("> ")
        terminal.send("/set ignore_eos true\n")
        terminal.until("ignore_eos = True")
        terminal.until("> ")
        terminal.send("/set max_tokens 3500\n")  # it writes for seconds
        terminal.until("max_tokens = 3500")
        terminal.until("> ")
        terminal.send("The index\n")
        terminal.until("The index\n")
        terminal.more(20)
        terminal.send("\x03")
        terminal.until("interrupted")
        terminal.until("> ")
        terminal.send("half a line")
        terminal.until("half a line")
        terminal.interrupt()
        terminal.send("/nonsense\n")
        terminal.until("there is no /nonsense")
        terminal.until("> ")
        terminal.send(f"/save {tmp_path / 'saved.json'}\n")
        terminal.until("4 messages in")
        terminal.until("> ")
        terminal.send("\x1b[A\n")  # the line before, by readline's history
        terminal.until("4 messages in")
        terminal.until("> ")
        terminal.send("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()
    saved = json.loads((tmp_path / "saved.json").read_text())
    assert [m["role"] for m in saved["messages"]] == ["user", "assistant"] * 2
    assert saved["messages"][0]["content"] == "The \nindex"
    history = tmp_path / "gristmill" / "chat_history"
    assert "/nonsense" in history.read_text() and history.stat().st_mode & 0o077 == 0


def test_without_a_name_the_default_model_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loaded(Exception):
        pass

    def load(options: dict[str, Any], *rest: object, **more: object) -> None:
        raise Loaded(options["model"])

    monkeypatch.setattr("gristmill.runtime.default_model.default_model", lambda: Path("/default.gguf"))
    monkeypatch.setattr(command, "load_llm", load)
    for given, taken in (([], "/default.gguf"), (["org/name:Q4_K_M"], "org/name:Q4_K_M")):
        result = CliRunner().invoke(cli, ["chat", *given])
        assert isinstance(result.exception, Loaded) and str(result.exception) == taken


def test_a_model_without_a_template_is_refused_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loaded(Exception):
        pass

    def load(*given: object) -> None:
        raise Loaded

    monkeypatch.setattr(LLM, "from_config", load)
    for given, expected in (
        ([], UsageError),
        (["--chat-template", "{% x %}"], UsageError),
        (["--chat-template", "{{ messages }}"], Loaded),
    ):
        result = CliRunner().invoke(cli, ["chat", str(MODELS / LLAMA), "--device", "cpu", *given])
        assert isinstance(result.exception, expected), result


def test_over_a_pipe(arguments: tuple[str, ...], environment: dict[str, str], tmp_path: Path) -> None:
    options = ("--max-tokens", "3", "--json")
    lines = "The index\n\n/etc is\n"
    done = forked.run(*arguments, *options, env=environment, cwd=ROOT, imported=forked.RUNTIME, given=lines)
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert (first["prompt"], second["prompt"]) == (
        "The index",
        "/etc is",
    )  # no command, and no empty question
    assert first["finish_reason"] == "length" and first["output_tokens"] == 3 and first["error"] is None
    assert second["prompt_tokens"] > first["prompt_tokens"] + 3  # the conversation goes on
    assert "> " not in done.stdout
