"""Numbers of the harness's own Hugging Face model: log-likelihoods, rolling ones, texts, whole tasks; refusals."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model, model_registry
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from gristmill.autotune.resolve import Resolver
from gristmill.integrations.lm_eval import GristmillLM, model, register
from gristmill.runtime.decode_graphs import DecodeGraphs
from gristmill.runtime.errors import UsageError
from gristmill.runtime.scheduler import FinishReason
from tests.runtime.oracle import LLAMA, MODELS, eval_tokens

ROOT = Path(__file__).parents[3]
NEAR = 1e-3
# A perplexity is the exponential of a mean: what two engines' roundings leave grows with its value.
NEAR_OF_ITSELF = 1e-5
OPTIONS = {"dtype": "float32", "num_blocks": 256}


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Our CPU kernels alone, which are taken as verified."""
    folder = tmp_path_factory.mktemp("gristmill")
    (folder / "policy.toml").write_text(
        f'cache = "{folder}"\nstrict = true\n[pins]\n"*" = ["*_cpu", "linear_torch", "linear_dequant_torch", '
        '"moe_chain_torch", "process_logits_torch", "logprobs_torch"]\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRISTMILL_POLICY", str(folder / "policy.toml"))
        patch.setattr(Resolver, "resolve", Resolver.select)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """docs-llama with what transformers needs to know its begin and end tokens."""
    path = tmp_path_factory.mktemp("model") / LLAMA
    path.mkdir()
    for file in (MODELS / LLAMA).iterdir():
        (path / file.name).symlink_to(file)
    backend = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    names = {token["id"]: token["content"] for token in backend["added_tokens"]}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": names[0], "eos_token": names[1]}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module")
def ours(folder: Path) -> GristmillLM:
    return GristmillLM(str(folder), max_length=200, **OPTIONS)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return HFLM(str(folder), max_length=200, dtype="float32", device="cpu", batch_size=3)


@pytest.fixture(scope="module")
def text(ours: GristmillLM) -> str:
    return str(ours.tokenizer.decode(eval_tokens()[:1500]))


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]


def pairs(text: str) -> list[tuple[str, str]]:
    """(context, continuation): none, one token, several, spaces at the end, a context that is cut."""
    return [
        ("", "The function returns a value."),
        ("The function returns", " a"),
        ("The function returns", " a copy of the input."),
        ("The function returns", " banana"),
        ("The function returns  ", "a copy"),
        (text[:300], text[300:420]),
        (text[:2500], text[2500:2600]),
        (text[100:400], text[400:402]),
    ]


def close(actual: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> bool:
    """Whether values are near and decisions equal."""
    return len(actual) == len(expected) and all(
        math.isclose(a, b, abs_tol=NEAR) and greedy == same
        for (a, greedy), (b, same) in zip(actual, expected, strict=True)
    )


def test_log_likelihoods(ours: GristmillLM, theirs: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = requests("loglikelihood", *pairs(text))
    expected = theirs.loglikelihood(given, disable_tqdm=True)
    assert close(ours.loglikelihood(given, disable_tqdm=True), expected)
    assert {greedy for _, greedy in expected} == {True, False}

    correct = model._loglikelihood
    monkeypatch.setattr(model, "_loglikelihood", lambda chunk, count: correct(chunk, count + 1))
    assert not close(ours.loglikelihood(given, disable_tqdm=True), expected)


def test_a_text_longer_than_the_model_is_rolled(ours: GristmillLM, theirs: Any, text: str) -> None:
    given = requests("loglikelihood_rolling", (text,), (text[:50],), (text[50:51],))
    expected = theirs.loglikelihood_rolling(given, disable_tqdm=True)
    actual = ours.loglikelihood_rolling(given, disable_tqdm=True)
    assert actual == pytest.approx(expected, abs=NEAR, rel=1e-6)
    assert len(ours.tok_encode(text)) > 5 * ours.max_length and actual[0] < actual[1] < 0


def test_texts(ours: GristmillLM, theirs: Any, text: str) -> None:
    given = requests(
        "generate_until",
        ("The function returns", {"until": ["input", "\n\n"], "max_gen_toks": 24}),
        ("The function returns", {"until": [".\n"], "max_gen_toks": 24, "do_sample": False}),
        (text[:300], {"until": [], "max_gen_toks": 1}),
        (text, {"until": ["\n"], "max_gen_toks": 40}),
    )
    actual = ours.generate_until(given, disable_tqdm=True)
    assert actual == theirs.generate_until(given, disable_tqdm=True)
    assert all(actual) and "input" not in actual[0]


def test_sampled_texts_need_their_options(ours: GristmillLM) -> None:
    options = {"do_sample": True, "temperature": 5.0, "max_gen_toks": 16, "seed": 3}
    given = requests("generate_until", ("The", options), ("The", {**options, "seed": 4}), ("The", options))
    one, other, again = ours.generate_until(given, disable_tqdm=True)
    assert one == again != other


def test_contexts_of_several_answers_are_computed_once(ours: GristmillLM, text: str) -> None:
    computed: list[int] = []
    run = ours.llm.engine.runner.launch
    context = text[400:1000]
    given = requests("loglikelihood", *((context, f" {letter}") for letter in "ABCDEFGH"))
    tokens = len(ours.tok_encode(context))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ours.llm.engine.runner,
            "launch",
            lambda entries, *rest: (computed.extend(e.count for e in entries), run(entries, *rest))[1],
        )
        ours.loglikelihood(given[:1], disable_tqdm=True)
        ours.loglikelihood(given, disable_tqdm=True)
    assert len({len(ours.tok_encode(pair.args[0] + pair.args[1])) for pair in given}) == 1
    assert tokens <= sum(computed) < tokens + 8 * 17


def test_logits_that_are_not_numbers(
    ours: GristmillLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    head = ours.llm.model.logits
    monkeypatch.setattr(DecodeGraphs, "why_not", lambda *_: "this model changes")
    monkeypatch.setattr(ours.llm.model, "logits", lambda *step: head(*step) * float("nan"), raising=False)
    [(value, greedy)] = ours.loglikelihood(requests("loglikelihood", ("The", " a")), disable_tqdm=True)
    assert math.isnan(value) and not greedy and "invalid_logits" in caplog.text
    assert FinishReason.ERROR.value == "error"


def tasks(folder: Path) -> None:
    """A multiple-choice task, a perplexity and a generation task, whose documents are a file."""
    words = [
        {"question": "The function returns", "choices": [" a copy", " banana", " the value"], "answer": 0},
        {"question": "Changed in version", "choices": [" 3.2", " apple", " of"], "answer": 1},
        {"question": "If the argument is", "choices": [" None", " tree"], "answer": 0},
    ]
    (folder / "docs.jsonl").write_text("".join(json.dumps(word) + "\n" for word in words))
    common = f"""
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder / "docs.jsonl"}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
    (folder / "choices.yaml").write_text(
        f"task: gm_choices\noutput_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: answer\n{common}"
        'target_delimiter: ""\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n'
    )
    (folder / "rolling.yaml").write_text(
        f"task: gm_rolling\noutput_type: loglikelihood_rolling\n{common}doc_to_target: question\n"
        "metric_list:\n  - metric: word_perplexity\n  - metric: bits_per_byte\n"
    )
    (folder / "texts.yaml").write_text(
        f"task: gm_texts\noutput_type: generate_until\n{common}"
        'doc_to_target: "{{choices[0]}}"\ngeneration_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 4\n'
        "metric_list:\n  - metric: exact_match\n"
    )


NAMES = ["gm_choices", "gm_rolling", "gm_texts"]


def metrics(results: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {
        (task, name): value
        for task, row in results["results"].items()
        for name, value in row.items()
        if isinstance(value, float)
    }


def test_whole_tasks_and_the_command_line(folder: Path, theirs: Any, tmp_path: Path) -> None:
    tasks(tmp_path)
    register()
    register()
    assert get_model("gristmill") is GristmillLM
    options = {"tasks": NAMES, "bootstrap_iters": 0, "task_manager": TaskManager(include_path=str(tmp_path))}
    expected = metrics(simple_evaluate(theirs, **options))
    arguments = f"pretrained={folder},dtype=float32,num_blocks=256,max_length=200"
    actual = simple_evaluate("gristmill", model_args=arguments, device="cpu", batch_size="auto", **options)
    assert metrics(actual) == pytest.approx(expected, abs=NEAR, rel=NEAR_OF_ITSELF)
    assert {task for task, _ in expected} == set(NAMES)

    line = [sys.executable, "-m", "gristmill.integrations.lm_eval", "--model", "gristmill"]
    line += [
        "--model_args",
        arguments,
        "--include_path",
        str(tmp_path),
        "--tasks",
        "gm_texts",
        "--device",
        "cpu",
    ]
    line += ["--output_path", str(tmp_path / "out.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "gm_texts" in done.stdout and "exact_match" in done.stdout


def test_another_package_has_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_registry._objs, "gristmill", HFLM)
    with pytest.raises(ValueError, match="HFLM, registered by another package"):
        register()


@pytest.mark.parametrize(
    "options,message",
    [
        ({"peft": "x"}, "an engine has no option 'peft'; known: dtype, quant"),
        ({"max_length": 0}, "max_length must be an integer from 1 to 4095, got 0"),
        ({"max_length": 4096}, "max_length must be an integer from 1 to 4095, got 4096"),
        ({"prefix_token_id": 4096}, "prefix_token_id must be an integer from 0 to 4095, got 4096"),
        ({"add_bos_token": 1}, "add_bos_token must be True or False, got 1"),
        ({"max_gen_toks": 0}, "max_gen_toks must be an integer of at least 1, got 0"),
        ({"device": "mps"}, "unknown device 'mps'"),
    ],
)
def test_arguments_that_are_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GristmillLM(str(folder), **{**OPTIONS, **options})


@pytest.mark.parametrize(
    "options,message",
    [
        (
            {"num_beams": 4, "max_gen_toks": 8},
            "generation options num_beams are not served; known: until, max_gen_toks",
        ),
        ({"max_gen_toks": 201}, "max_gen_toks 201 leaves no room for a context: requests hold 201 tokens"),
    ],
)
def test_generation_options_that_are_refused(
    ours: GristmillLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((UsageError, ValueError), match=message):
        ours.generate_until(requests("generate_until", ("The", options)), disable_tqdm=True)


def test_a_directory_without_special_tokens(ours: GristmillLM, text: str) -> None:
    """docs-llama as it is: the end of a text is that of config.json, and it stands before a text."""
    plain = GristmillLM(str(MODELS / LLAMA), **OPTIONS)
    assert plain.tokenizer.eos_token_id is None and plain.eot_token_id == plain.prefix_token_id == 1
    given = requests("loglikelihood", ("The function returns", " a copy"))
    assert close(plain.loglikelihood(given, disable_tqdm=True), ours.loglikelihood(given, disable_tqdm=True))
    options = {"until": ["."], "max_gen_toks": 12}
    [one] = plain.generate_until(requests("generate_until", ("The function", options)), disable_tqdm=True)
    assert [one] == ours.generate_until(
        requests("generate_until", ("The function", options)), disable_tqdm=True
    )


def test_a_continuation_longer_than_the_model(ours: GristmillLM, text: str) -> None:
    with pytest.raises(ValueError, match="is longer than max_length, 200"):
        ours.loglikelihood(requests("loglikelihood", ("The", text)), disable_tqdm=True)
