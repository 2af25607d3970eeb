"""The gristmill command line as users call it, in this process unless a separate one is tested."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gristmill import LLM, SamplingParams
from gristmill.kernel_registry.policy import Policy
from gristmill.tools.cli import main
from tests import forked
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS

MODEL = str(MODELS / LLAMA)
TOKENS = str(MODELS / "eval_tokens.u16")


@dataclass(frozen=True)
class CommandResult:
    """The outcome of a command."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., CommandResult]


@pytest.fixture(scope="module")
def cache(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy for the commands of this file: the cache of this run."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "policy.toml").write_text(f'cache = "{policy.cache}"\n')
    return folder


@pytest.fixture
def gristmill(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command line."""

    def run(*arguments: str) -> CommandResult:
        monkeypatch.setenv("GRISTMILL_POLICY", str(cache / "policy.toml"))
        monkeypatch.setattr(sys, "argv", ["gristmill", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return CommandResult(int(end.value.code or 0), out, err)

    return run


def test_why_a_completion_failed(gristmill: Command) -> None:
    command = (
        "generate",
        "--model",
        MODEL,
        "--dtype",
        "fp32",
        "--prompt",
        "The CREATE INDEX statement",
        "--repetition-penalty",
        "1e-38",
    )
    answer = json.loads(gristmill(*command, "--json").stdout)
    assert answer["finish_reason"] == "error" and answer["error"]["code"] == "parameters_overflow"
    assert "finish: error (parameters_overflow: the model's" in " ".join(gristmill(*command).stderr.split())


def test_as_a_program(cache: Path) -> None:
    """In a separate process: text on stdout, timings on stderr; an error is status 2 and one line."""
    source = Path(__file__).resolve().parents[2] / "src"
    environment = {**os.environ, "GRISTMILL_POLICY": str(cache / "policy.toml"), "PYTHONPATH": str(source)}
    options = ("-m", "gristmill.tools.cli", "generate", "--model", MODEL, "--dtype", "fp32")
    command = [sys.executable, *options, "--prompt", "The SELECT", "--max-tokens", "4"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0 and result.stdout.strip() and "4 tokens in" in result.stderr
    assert result.stderr.startswith("gristmill: device auto: ")
    wrong = forked.run(*options, "--device", "cpu", "--prompt", "", env=environment, imported=forked.RUNTIME)
    assert (wrong.returncode, wrong.stdout) == (2, "") and len(wrong.stderr.strip().splitlines()) == 1


def test_generate_with_every_sampling_option(gristmill: Command) -> None:
    """The options set the same parameters: the ids equal those of the library."""
    options = (
        "generate",
        "--model",
        MODEL,
        "--prompt",
        "The SELECT",
        "--max-tokens",
        "12",
        "--dtype",
        "fp32",
        "--json",
    )
    text = json.loads(gristmill(*options).stdout)["text"]
    result = gristmill(*options, "--stop", text[9:13], "--stop", "never there", "--logprobs", "2")
    output = json.loads(result.stdout)
    assert output["text"] == text[: text.index(text[9:13])] and output["finish_reason"] == "stop"
    assert [one["token_id"] for one in output["logprobs"]] == output["token_ids"]
    assert all(len(one["top"]) == 2 and one["rank"] == 1 for one in output["logprobs"])
    wishes = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "min_tokens": 12}
    flags = [part for name, value in wishes.items() for part in ("--" + name.replace("_", "-"), str(value))]
    edited = json.loads(gristmill(*options, *flags, "--bad-word", "query").stdout)
    llm = LLM(MODEL, dtype="fp32", warm="off")
    params = SamplingParams(max_tokens=12, bad_words=["query"], **wishes)  # type: ignore[arg-type]
    assert edited["token_ids"] == list(llm.generate("The SELECT", params)[0].token_ids)
    assert edited["text"] != text and edited["logprobs"] is None
    few = {
        "allowed_token_ids": [40, 41, 300],
        "logit_bias": {300: 4.0},
        "n": 2,
        "temperature": 1.0,
        "seed": 3,
    }
    flags = ["--allowed-token-ids", "40,41,300", "--logit-bias", '{"300": 4.0}', "--n", "2"]
    several = json.loads(gristmill(*options, *flags, "--temperature", "1", "--seed", "3").stdout)
    expected = llm.generate("The SELECT", SamplingParams(max_tokens=12, **few))  # type: ignore[arg-type]
    assert [one["token_ids"] for one in several["choices"]] == [list(one.token_ids) for one in expected]
    ends = str(llm.generate("The SELECT", SamplingParams(max_tokens=12))[0].token_ids[3])
    stopped = json.loads(gristmill(*options, "--stop-token-ids", ends, "--prompt-logprobs", "0").stdout)
    assert len(stopped["token_ids"]) == 4 and stopped["finish_reason"] == "stop"
    assert len(stopped["prompt_logprobs"]) == stopped["prompt_tokens"] and not stopped["prompt_logprobs"][0]
    whole = json.loads(gristmill(*options, "--stop", text[9:13], "--include-stop-str-in-output").stdout)
    assert whole["text"] == text[: text.index(text[9:13]) + 4]
    chosen = json.loads(gristmill(*options, "--structured-output", '{"choice": ["seven", "eight"]}').stdout)
    assert chosen["text"] in ("seven", "eight")
    wrong = gristmill(*options, "--presence-penalty", "3")
    assert wrong.returncode == 2 and "presence_penalty must be a number in [-2, 2], got 3.0" in wrong.stderr


def test_sampling_parameters_from_a_file(gristmill: Command, tmp_path: Path) -> None:
    options = ("generate", "--model", MODEL, "--prompt", "The SELECT", "--dtype", "fp32", "--json")
    file = tmp_path / "params.json"

    def run(text: str, *more: str) -> CommandResult:
        file.write_text(text)
        return gristmill(*options, "--params", str(file), *more)

    params = {"max_tokens": 9, "logit_bias": {"300": -50}, "structured_output": {"regex": "[a-z ]{20}"}}
    first = json.loads(run(json.dumps(params)).stdout)
    assert 300 not in first["token_ids"] and len(first["token_ids"]) <= 9 and first["text"].islower()
    assert len(json.loads(run(json.dumps(params), "--max-tokens", "2").stdout)["token_ids"]) == 2
    mistake(run("[1]"), "a JSON object is expected")
    mistake(run("[" * 100_000), "nested too deeply")
    mistake(run('{"max_token": 3}'), "params.json has no max_token; known: max_tokens")
    mistake(run('{"structured_output": {"regexp": "a"}}'), "structured output has no regexp; known: json")
    mistake(gristmill(*options, "--params", str(tmp_path / "absent.json")), "cannot read")
    mistake(gristmill(*options, "--logit-bias", "[3]"), "a JSON object is expected")


def test_sigterm_ends_generation_with_what_there_is(gristmill: Command) -> None:
    options = (
        "generate",
        "--model",
        MODEL,
        "--prompt",
        "The SELECT",
        "--max-tokens",
        "4000",
        "--dtype",
        "fp32",
    )
    before, stream = signal.getsignal(signal.SIGTERM), LLM.stream

    def watched(self: LLM, *arguments: Any) -> Any:
        for number, chunk in enumerate(stream(self, *arguments)):
            yield chunk
            if number == 20:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLM, "stream", watched)
        result = gristmill(*options, "--json", "--ignore-eos")
    output = json.loads(result.stdout)
    assert output["finish_reason"] == "abort" and 0 < len(output["token_ids"]) < 4000
    assert signal.getsignal(signal.SIGTERM) is before


def test_generate(gristmill: Command) -> None:
    options = ("generate", "--model", MODEL, "--prompt", "The SELECT", "--max-tokens", "8", "--dtype", "fp32")
    plain, as_json = gristmill(*options, "--explain"), gristmill(*options, "--json")
    assert (plain.returncode, as_json.returncode) == (0, 0), plain.stderr + as_json.stderr
    output = json.loads(as_json.stdout)
    assert output.keys() == {
        "prompt",
        "text",
        "token_ids",
        "finish_reason",
        "error",
        "kv_transfer",
        "prompt_tokens",
        "seconds",
        "tokens_per_second",
        "weight_bytes",
        "logprobs",
        "explain",
        "decode_graphs",
        "speculation",
        "choices",
        "prompt_logprobs",
    }
    assert (
        len(output["token_ids"]),
        output["finish_reason"],
        output["explain"],
        output["decode_graphs"],
    ) == (
        8,
        "length",
        None,
        None,
    )
    assert plain.stdout.startswith(output["text"]) and "paged_attention" in plain.stdout
    assert "8 tokens in" in plain.stderr
    graphs = gristmill(*options, "--decode-graphs", "--async-steps", "--explain", "--json")
    same = json.loads(graphs.stdout)
    assert same["token_ids"] == output["token_ids"]
    assert [(r["seqs"], r["captured"], r["steps"]) for r in same["decode_graphs"]] == [
        (1, True, 7),
        (None, False, 1),
    ]


def test_warm(gristmill: Command) -> None:
    options = ("--max-seqs", "2", "--max-batch-tokens", "16", "--max-model-len", "32", "--dtype", "fp32")
    warmed = gristmill("warm", "--model", MODEL, *options, "--json")
    assert warmed.returncode == 0, warmed.stderr
    report = json.loads(warmed.stdout)
    assert (
        report["seconds"].keys() == {"weights", "selection", "verification", "compilation"}
        and report["kernels"] > 20
    )
    shown = gristmill("warm", "--model", MODEL, *options, "--warm", "off")  # which is not what was asked for
    assert re.search(r"weights +\d+\.\d\n.*\nverification +0\.0\n", shown.stdout), shown.stdout


def test_eval_and_quantize(gristmill: Command, tmp_path: Path) -> None:
    options = ("--tokens", TOKENS, "--window", "64", "--windows", "3", "--dtype", "fp32", "--json")
    rounded = gristmill("eval", "--model", MODEL, "--quant", "int4_g128", *options)
    assert rounded.returncode == 0, rounded.stderr
    output = json.loads(rounded.stdout)
    assert output.keys() == {"loss", "perplexity", "tokens", "seconds"} and output["tokens"] == 3 * 63
    out = str(tmp_path / "out")
    written = gristmill("quantize", "--model", MODEL, "--quant", "int4_g128", "--out", out, "--json")
    assert written.returncode == 0, written.stderr
    assert json.loads(written.stdout)["scheme"] == "int4_g128"
    second_run = gristmill("eval", "--model", out, *options)
    assert json.loads(second_run.stdout)["loss"] == output["loss"]
    refused = gristmill("quantize", "--model", MODEL, "--quant", "nvfp4", "--out", out)
    assert refused.returncode == 2 and f"{out} exists and is not an empty folder" in refused.stderr


@pytest.mark.parametrize("command", [(), ("generate",), ("eval",), ("quantize",)])
def test_help(gristmill: Command, command: tuple[str, ...]) -> None:
    result = gristmill(*command, "--help")
    assert (
        result.returncode == 0
        and "--help" in result.stdout
        and "--json" in result.stdout + ("" if command else "--json")
    )


def mistake(result: CommandResult, message: str) -> None:
    """Asserts status 2, nothing on stdout, and one line on stderr that contains `message`."""
    assert (result.returncode, result.stdout) == (2, ""), result
    assert message in result.stderr and len(result.stderr.strip().splitlines()) == 1, result.stderr


PROMPT = ("generate", "--model", MODEL, "--prompt", "x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "--model", "/absent", "--prompt", "x"), "no model directory /absent"),
        (("generate", "--model", MODEL, "--prompt", ""), "prompt is empty"),
        (("generate", "--model", MODEL, "--prompt", "the " * 5000), "prompt tokens"),
        ((*PROMPT, "--quant", "int5"), "unknown scheme 'int5'"),
        ((*PROMPT, "--dtype", "fp7"), "unknown dtype 'fp7'; known: auto, fp32, fp16, bf16"),
        ((*PROMPT, "--device", "tpu"), "unknown device 'tpu'; known: auto, cpu, cuda"),
        ((*PROMPT, "--drain-seconds", "-1"), "--drain-seconds must be seconds, at least 0, got -1.0"),
        ((*PROMPT, "--drain-seconds", "nan"), "--drain-seconds must be seconds, at least 0, got nan"),
        ((*PROMPT, "--temperature", "-1"), "temperature must be a finite number of at least 0, got -1"),
        ((*PROMPT, "--max-tokens", "0"), "max_tokens must be an integer of at least 1, got 0"),
        ((*PROMPT, "--max-tokens", "many"), "'many' is not a valid integer"),
        ((*PROMPT, "--top-p", "1.5"), "top_p must be a number in (0, 1], got 1.5"),
        ((*PROMPT, "--policy", "/absent.toml"), "/absent.toml"),
        (("generate", "--model", MODEL), "--prompt"),
        (("generat",), "generat"),
        (("generate", "--model", MODEL, "--prompt", "a\udcff"), "half of a surrogate pair"),
        (("eval", "--model", MODEL, "--tokens", "/absent.u16"), "cannot read /absent.u16"),
        (("eval", "--model", MODEL, "--tokens", TOKENS, "--windows", "9999"), "10238976 tokens, got"),
        (
            ("eval", "--model", MODEL, "--tokens", TOKENS, "--window", "5000", "--windows", "1"),
            "longer than the longest possible request",
        ),
        (("eval", "--model", MODEL, "--tokens", TOKENS, "--window", "1"), "a window of at least 2 tokens"),
        (("quantize", "--model", MODEL, "--quant", "bf16", "--out", "/absent/x"), "not a quantized scheme"),
        (("quantize", "--model", MODEL, "--quant", "nvfp4", "--out", "/proc/x"), "cannot write to /proc"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    gristmill: Command, arguments: tuple[str, ...], message: str
) -> None:
    mistake(gristmill(*arguments, "--json"), message)


def cut(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])


def edit(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def lfs_pointer(name: str) -> Callable[[Path], None]:
    """A file as a clone has it that was made without Git LFS."""

    def change(folder: Path) -> None:
        digest = "sha256:" + 64 * "0"
        (folder / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid {digest}\nsize 1\n")

    return change


def adapter(*without: str) -> Callable[[Path], None]:
    """A directory that PEFT has written, which has no model; some have the base model's config.json."""

    def change(folder: Path) -> None:
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        for name in without:
            (folder / name).unlink()

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "is truncated or corrupt: "),
        (lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(), "missing shard"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "cannot read"),
        (
            edit(architectures=["MambaForCausalLM"]),
            "architecture MambaForCausalLM is not supported; known: ",
        ),
        (edit(num_hidden_layers=5), "left unwritten"),
        (
            edit(num_hidden_layers=3, num_nextn_predict_layers=0),
            "no parameter of the model takes: model.layers.3",
        ),
        (edit(vocab_size=4000), "must have shape [4000, 256], got [4096, 256]"),
        *((lfs_pointer(name), "it is a pointer of Git LFS") for name in ("config.json", "tokenizer.json")),
        (lfs_pointer("model-00001-of-00002.safetensors"), "it is a pointer of Git LFS"),
        (adapter("model.safetensors.index.json"), "is of an adapter (LoRA), which is not loaded: merge it"),
        (adapter("model.safetensors.index.json", "config.json"), "is of an adapter (LoRA)"),
    ],
)
def test_a_damaged_directory_is_one_line_and_exit_2(
    gristmill: Command, tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    folder = Path(shutil.copytree(MODELS / DEEPSEEK, tmp_path / "model"))
    damage(folder)
    mistake(gristmill("generate", "--model", str(folder), "--prompt", "x", "--json"), message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stict = true", "unknown policy entry 'stict'; entries are pins"),
        ('strict = "yes"', "strict wants true or false, got 'yes'"),
        ("strict", "policy "),
        ('cpu_level = "avx1024"', "cpu_level 'avx1024': this CPU runs"),
        ('strict = true\nexclude = ["*"]', "no kernel for"),
        ("\xff", "policy.toml: not UTF-8 text: "),
    ],
)
def test_a_wrong_policy_is_one_line_and_exit_2(
    gristmill: Command, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "policy.toml").write_text(text, encoding="latin-1")
    mistake(gristmill(*PROMPT, "--json", "--policy", str(tmp_path / "policy.toml")), message)
