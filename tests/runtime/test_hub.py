"""Models by name: a path that exists, or a repository of the Hugging Face hub, against a stand-in of its routes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from gristmill import LLM, SamplingParams
from gristmill.bench.shapes import load_config as bench_config
from gristmill.kernel_registry.policy import Policy
from gristmill.quant.errors import ConfigError, UsageError
from gristmill.runtime.hub import HubName, local_model
from gristmill.runtime.hub_files import model_files
from gristmill.runtime.loader.config import load_config
from gristmill.runtime.parallel.replicas import Replicas
from gristmill.runtime.speculation.draft import check_draft_model
from gristmill.runtime.tokenizer import Tokenizer
from gristmill.tools.cli import cli
from tests import forked
from tests.runtime.hub_server import TOKEN, Hub, Repository, serving
from tests.runtime.oracle import LLAMA, MODELS

DIRECTORY = {path.name: path for path in (MODELS / LLAMA).iterdir()}
SHARDS = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
SHARDED: dict[str, bytes | Path] = {
    "config.json": b"{}",
    "README.md": b"# A model",
    "modeling_custom.py": b"raise SystemExit",
    "pytorch_model.bin": b"\x80\x04.",
    "consolidated.safetensors": b"of another loader",
    "model.safetensors.index.json": json.dumps({"weight_map": SHARDS}).encode(),
    "model-00001-of-00002.safetensors": b"1" * 70_000,
    "model-00002-of-00002.safetensors": b"2",
    "tokenizer.json": b'{"of": "tokenizer.json"}',
    "tokenizer_config.json": b'{"of": "tokenizer_config.json"}',
    "chat_template.jinja": b"{{ messages }}",
    "1_Pooling/config.json": b'{"of": "1_Pooling/config.json"}',
    "artifact.metadata": b'{"of": "artifact.metadata"}',
    "onnx/model.onnx": b"onnx",
    "quantize_config.json": b'{"of": "quantize_config.json"}',
}
FETCHED = {
    "config.json",
    "model.safetensors.index.json",
    *SHARDS.values(),
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "1_Pooling/config.json",
    "artifact.metadata",
    "quantize_config.json",
}
GGUFS: dict[str, bytes | Path] = {
    "README.md": b"",
    "config.json": b"{}",
    "small-Q4_K_M.gguf": b"GGUF of Q4_K_M",
    "small-Q4_K_S.gguf": b"GGUF of Q4_K_S",
    "small-IQ4_XS.gguf": b"GGUF of IQ4_XS",
    "BF16/small-BF16-00001-of-00002.gguf": b"GGUF, half of it",
    "mmproj-small-f16.gguf": b"GGUF of a projector",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A stand-in of the hub, which the client of this process asks, with a cache of its own."""
    with serving() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "tokens"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        hub.repositories |= {
            "org/sharded": Repository(
                {"main": SHARDED, "v1": {**SHARDED, "config.json": b'{"old": 1}'}},
                large={*SHARDS.values()},
            ),
            "org/ggufs": Repository({"main": GGUFS}),
            "org/one-gguf": Repository({"main": {"model.gguf": b"GGUF", "mmproj.gguf": b"GGUF"}}),
            "org/pickled": Repository({"main": {"config.json": b"{}", "pytorch_model.bin": b"\x80"}}),
            "org/gated": Repository({"main": DIRECTORY}, gated=True),
            "org/private": Repository({"main": DIRECTORY}, private=True),
        }
        yield hub


def _names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_names() -> None:
    for text, parts in {
        "org/name": ("org/name", "", ""),
        "Org-1/na.me_2:Q4_K_M": ("Org-1/na.me_2", "Q4_K_M", ""),
        "org/name:folder/a file.gguf": ("org/name", "folder/a file.gguf", ""),
        "org/name@refs/pr/1": ("org/name", "", "refs/pr/1"),
        "org/name@v1:*.gguf": ("org/name", "*.gguf", "v1"),
        "org/name:x.gguf@v1": ("org/name", "x.gguf", "v1"),
    }.items():
        assert HubName.parse(text) == HubName(*parts), text
    for text in (
        "", "name", "/org/name", "./name", "../name", "org/name/", "a/b/c", "org/../name", "org/na--me", "org/name:",
        "org/name@", "org/name@a@b", "org/name.gguf", "org/config.json", "ørg/name", "org/na me", "org/name\n", "https://x/y", "o/" + "n" * 96,
    ):  # fmt: skip
        assert HubName.parse(text) is None, text


def test_a_model_by_name_answers_as_its_directory(hub: Hub) -> None:
    hub.repositories["org/docs"] = Repository({"main": DIRECTORY}, large={"model.safetensors"})
    options = {"dtype": "fp32", "device": "cpu", "num_blocks": 32, "warm": "off"}
    params = SamplingParams(max_tokens=6)
    named = LLM("org/docs", **options).generate("The index", params)
    assert [one.text for one in named] == [
        one.text for one in LLM(MODELS / LLAMA, **options).generate("The index", params)
    ]
    assert "training.json" not in hub.fetched() and "model.safetensors" in hub.fetched()
    # A second time nothing is transferred.
    hub.asked.clear()
    assert load_config("org/docs") == load_config(MODELS / LLAMA)
    assert hub.fetched() == []


def test_only_what_is_needed_is_fetched(hub: Hub) -> None:
    folder = local_model("org/sharded")
    assert _names(folder) == FETCHED == {*hub.fetched()}
    for name in FETCHED:
        assert (folder / name).read_bytes() == SHARDED[name]
    assert json.loads((local_model("org/sharded@v1") / "config.json").read_text()) == {"old": 1}
    assert json.loads((folder / "config.json").read_text()) == {}


def test_a_path_that_exists_wins(hub: Hub, tmp_path: Path) -> None:
    for name in ("org/sharded", "org/ggufs:Q4_K_M"):
        (tmp_path / name).mkdir(parents=True)
        assert local_model(name) == Path(name)
    assert local_model(Path("org/private")) == Path("org/private")  # a Path is no name
    assert hub.asked == []


@pytest.mark.parametrize(
    ("wanted", "file"),
    [
        ("org/ggufs:Q4_K_M", "small-Q4_K_M.gguf"),
        ("org/ggufs:q4_k_s", "small-Q4_K_S.gguf"),
        ("org/ggufs:IQ4_XS", "small-IQ4_XS.gguf"),
        ("org/ggufs:small-Q4_K_M.gguf", "small-Q4_K_M.gguf"),
        ("org/ggufs:*IQ*", "small-IQ4_XS.gguf"),
        ("org/ggufs@main:Q4_K_M", "small-Q4_K_M.gguf"),
        ("org/one-gguf", "model.gguf"),
    ],
)
def test_one_gguf_file(hub: Hub, wanted: str, file: str) -> None:
    path = local_model(wanted)
    assert path.name == file and path.read_bytes().startswith(b"GGUF") and hub.fetched() == [file]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("org/ggufs", r"several GGUF files: name one, as org/ggufs:.* They are: BF16/.*small-Q4_K_S.gguf"),
        ("org/ggufs:Q4_K", r"has no GGUF file 'Q4_K'. It has: .*small-Q4_K_M.gguf"),
        ("org/ggufs:*Q4_K*", r"could be any of: small-Q4_K_M.gguf.*, small-Q4_K_S.gguf"),
        ("org/ggufs:Q4_XS", r"has no GGUF file 'Q4_XS'"),
        ("org/ggufs:BF16", r"one of 2 parts of a model; .*llama-gguf-split --merge"),
        ("org/ggufs:config.json", r"org/ggufs:config.json is no GGUF file"),
        ("org/sharded:Q8_0", r"org/sharded has no GGUF files"),
        ("org/pickled", r"has neither model.safetensors nor .*; its 1 pickled files are never fetched"),
        ("org/absent", r"org/absent is neither a path here nor a repository .*: a private one needs HF_TOKEN"),
        ("org/sharded@v2", r"org/sharded has no revision 'v2': expected a branch, a tag or a commit of http"),
        ("org/private", r"org/private is neither a path here nor a repository .*HF_TOKEN"),
        ("org/gated", r"org/gated is gated: accept its terms at http.*/org/gated, then set HF_TOKEN"),
        ("absent", r"no model directory absent: expected a folder .*or a repository of the Hugging Face hub"),
    ],
)  # fmt: skip
def test_what_cannot_be_fetched_is_said(hub: Hub, wanted: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        local_model(wanted)
    assert not any(name.endswith((".bin", ".gguf", ".py")) for name in hub.fetched())


def test_a_name_of_neither_kind_shows_what_is_near(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "models" / "docs-llama").mkdir(parents=True)
    (tmp_path / "models" / "notes").mkdir()
    for wanted in ("models/docs-lama", "./models/docs-lama"):
        with pytest.raises(ConfigError, match="; near it: models/docs-llama$"):
            local_model(wanted)
    with pytest.raises(UsageError, match="no-such.gguf"):
        load_config("models/no-such.gguf")


def test_tokens(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (local_model("org/gated") / "config.json").is_file()
    assert (local_model("org/private") / "config.json").is_file()
    monkeypatch.setenv("HF_TOKEN", "hf_revoked")
    with pytest.raises(ConfigError, match="answered 401: the token in use is not valid"):
        local_model("org/private")


def test_a_transfer_that_breaks_off_goes_on(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = SHARDS["a.weight"]
    hub.repositories["org/sharded"].cut.add(shard)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 5000)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    folder = local_model("org/sharded")
    assert (folder / shard).read_bytes() == SHARDED[shard]
    assert [begin for _, path, begin in hub.asked if "elsewhere" in path and begin.startswith("bytes=35000")]


def test_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, file = local_model("org/sharded"), local_model("org/ggufs:Q4_K_M")
    asked = len(hub.asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert local_model("org/sharded") == folder and local_model("org/ggufs:Q4_K_M") == file
    with pytest.raises(
        ConfigError, match="is not in the cache .*, and HF_HUB_OFFLINE is set: fetch it where"
    ):
        local_model("org/one-gguf")
    with pytest.raises(ConfigError, match="has no GGUF file 'Q4_K_S'"):
        local_model("org/ggufs:Q4_K_S")
    (folder / SHARDS["b.weight"]).unlink()
    with pytest.raises(ConfigError, match="only in part, without model-00002-of-00002.safetensors"):
        local_model("org/sharded")
    assert len(hub.asked) == asked


def test_a_hub_that_fails_leaves_the_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = local_model("org/sharded")
    hub.status = 503
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    with pytest.warns(UserWarning, match="taking org/sharded from the cache"):
        assert local_model("org/sharded") == folder
    with pytest.raises(ConfigError, match="org/ggufs:Q4_K_M is not in the cache .* cannot be reached"):
        local_model("org/ggufs:Q4_K_M")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(ConfigError, match="http://127.0.0.1:9 cannot be reached"):
        local_model("org/ggufs:Q4_K_M")


def test_a_full_disk(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage("/")._replace(free=1000)
        patch.setattr(shutil, "disk_usage", lambda place: usage)
        with pytest.raises(ConfigError, match="0.00 GB are to be fetched, .* or have HF_HOME name a folder"):
            local_model("org/sharded")
        assert hub.fetched() == ["model.safetensors.index.json"]
    # One that fills up meanwhile.
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _raising(full))
    with pytest.raises(ConfigError, match="org/sharded: .* make room, or have HF_HOME name"):
        local_model("org/sharded")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _raising(httpx.ReadError("cut")))
    with pytest.raises(ConfigError, match="broke off .cut.: start again, and it continues"):
        local_model("org/sharded")


def _raising(error: Exception):
    def raises(*arguments: object, **options: object) -> None:
        raise error

    return raises


def test_names_that_leave_the_folder_are_no_files() -> None:
    sizes = dict.fromkeys(("../up.gguf", "/etc/x.gguf", "a\\b.gguf", "in/side.gguf"), None)
    assert model_files("org/name", "", sizes, list).gguf == "in/side.gguf"
    with pytest.raises(ConfigError, match="has no GGUF file '../up.gguf'"):
        model_files("org/name", "../up.gguf", sizes, list)


def test_a_repository_in_the_layout_of_its_own_code() -> None:
    """Where the layout of Hugging Face is there too, that one is fetched."""
    sizes = dict.fromkeys(("params.json", "consolidated.safetensors", "tekken.json", "README.md"), None)
    own = model_files("org/name", "", sizes, list)
    assert own.names == ("tekken.json", "params.json", "consolidated.safetensors")
    both = model_files("org/name", "", sizes | {"config.json": None, "model.safetensors": None}, list)
    assert both.names == ("tekken.json", "config.json", "model.safetensors")


def test_an_index_may_not_name_other_files(hub: Hub) -> None:
    for shard in ("../../x.safetensors", "absent.safetensors"):
        index = json.dumps({"weight_map": {"a": shard}}).encode()
        hub.repositories["org/odd"] = Repository(
            {"main": {"config.json": b"{}", "model.safetensors.index.json": index, shard[:1]: b""}}
        )
        with pytest.raises(ConfigError, match="names .*, which the repository has not"):
            local_model("org/odd")


def test_kernelbench_reads_the_configuration_alone(hub: Hub) -> None:
    hub.repositories["org/docs"] = Repository({"main": DIRECTORY})
    assert bench_config("org/docs") == bench_config(str(MODELS / LLAMA))
    assert hub.fetched() == ["config.json"]


def test_wherever_a_model_is_named(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["org/docs"] = Repository({"main": DIRECTORY})
    assert check_draft_model("org/docs", "org/docs@main").path == local_model("org/docs")
    with pytest.raises(ConfigError, match="draft model: org/absent is neither a path here nor"):
        check_draft_model(MODELS / LLAMA, "org/absent")
    with pytest.raises(ConfigError, match="org/absent is neither a path here nor"):
        Replicas("org/absent", 2)  # at once, not in two processes
    assert Tokenizer("org/docs").encode("The index") == Tokenizer(MODELS / LLAMA).encode("The index")
    out = tmp_path / "quantized"
    result = CliRunner().invoke(
        cli, ["quantize", "--model", "org/docs", "--quant", "int8_ch", "--out", str(out), "--json"]
    )
    assert result.exit_code == 0, result.exception
    assert load_config(out).quantization is not None and (out / "tokenizer.json").is_file()
    assert not (out / "tokenizer.json").is_symlink()  # a copy, not a link into the cache


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert local_model(str(tmp_path)) == tmp_path
    with pytest.raises(
        ConfigError, match=r"need the package huggingface_hub: pip install 'gristmill\[runtime\]'"
    ):
        local_model("org/name")


def test_several_at_once_fetch_it_once(hub: Hub) -> None:
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(local_model("org/ggufs:Q4_K_M"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4 and len({*paths}) == 1 and paths[0].read_bytes() == GGUFS["small-Q4_K_M.gguf"]
    assert hub.fetched() == ["small-Q4_K_M.gguf"]


def test_the_command_line_and_the_variables(policy: Policy, tmp_path: Path) -> None:
    """A process of its own, since the client reads its variables when it is imported."""
    with serving() as hub:
        hub.repositories["org/docs"] = Repository({"main": DIRECTORY})
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "GRISTMILL_POLICY": str(tmp_path / "policy.toml"),
        }
        (tmp_path / "policy.toml").write_text(f'cache = "{policy.cache}"\n')
        command = ("-m", "gristmill.tools.cli", "generate", "--model", "org/docs", "--prompt", "The index")
        command = (*command, "--max-tokens", "4", "--device", "cpu", "--num-blocks", "32")
        first = forked.run(*command, "--json", env=environment, imported=forked.RUNTIME)
        assert first.returncode == 0, first.stderr
        assert len(json.loads(first.stdout)["token_ids"]) == 4
        assert list((tmp_path / "home" / "hub").glob("models--org--docs/snapshots/*/config.json"))
        asked = len(hub.asked)
        offline = {**environment, "HF_HUB_OFFLINE": "1"}
        again = forked.run(*command, "--json", env=offline, imported=forked.RUNTIME)
        assert (
            json.loads(again.stdout)["text"] == json.loads(first.stdout)["text"] and len(hub.asked) == asked
        )
        wrong = (*command[:4], "org/docz", *command[5:])
        absent = forked.run(*wrong, env=environment, imported=forked.RUNTIME)
        assert absent.returncode == 2 and "org/docz is neither a path here nor" in absent.stderr
