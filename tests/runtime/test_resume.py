"""`gristmill quantize`, killed and started again, resumes after the last complete layer and writes the same
bytes."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant.writing.checkpoint import write_quantized
from gristmill.quant.writing.unfinished import Unfinished
from gristmill.runtime.errors import CheckpointError, UsageError
from gristmill.runtime.loader.config import load_config
from gristmill.runtime.models import model_table
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `gristmill quantize` as a separate process; processes that still run at the end are killed."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "policy.toml").write_text(f'cache = "{folder}"\n')
    source = Path(__file__).resolve().parents[2] / "src"
    environment = {**os.environ, "GRISTMILL_POLICY": str(folder / "policy.toml"), "PYTHONPATH": str(source)}
    started: list[subprocess.Popen[str]] = []

    def run(model: str, out: Path, method: str, *more: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "gristmill.tools.cli",
            "quantize",
            "--model",
            str(MODELS / model),
            "--out",
            str(out),
        ]
        if method != "rtn":
            command += ["--calibration", str(MODELS / "eval_tokens.u16"), "--window", "128", "--windows", "2"]
        command += ["--method", method, "--json", *more]
        started.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
            )
        )
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def finish(process: subprocess.Popen[str]) -> dict[str, object]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return dict(json.loads(out))


def kill_after(process: subprocess.Popen[str], part: Path) -> None:
    """Sends SIGKILL as soon as a part exists."""
    end = time.monotonic() + 300
    while not part.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "method"), [(LLAMA, "gptq"), (DEEPSEEK, "awq")])
def test_a_killed_run_goes_on(
    model: str, method: str, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    options = ("--quant", "int4_g64", "--format", "compressed-tensors")
    uninterrupted = finish(start(model, tmp_path / "whole", method, *options))
    assert uninterrupted["resumed"] == 0
    out, unfinished = tmp_path / "out", tmp_path / ".out.unfinished"
    kill_after(start(model, out, method, *options), unfinished / "part-00001.safetensors")
    assert not out.exists() and not (unfinished / "part-00003.safetensors").exists()
    other = start(model, out, method, "--quant", "nvfp4", "--format", "modelopt", "--windows", "3")
    _, err = other.communicate(timeout=300)
    assert other.returncode == 2 and "was begun with" in err, err
    for message in (
        "format compressed-tensors, not modelopt",
        "quant int4_g64, not nvfp4",
        "windows 2, not 3",
        "resume, or delete",
    ):
        assert message in " ".join(err.split()), err
    kill_after(start(model, out, method, *options), unfinished / "part-00002.safetensors")  # once more
    assert int(str(finish(start(model, out, method, *options))["resumed"])) >= 3
    assert files(out) == files(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_layers_that_are_there_are_not_done_again(tmp_path: Path) -> None:
    """A finished layer is kept even if it was modified; only missing layers are quantized."""
    table, scheme = model_table(load_config(MODELS / LLAMA)), QuantScheme.parse("nvfp4")

    def stop(done: int, total: int) -> None:
        if done > 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_quantized(MODELS / LLAMA, tmp_path / "out", table, scheme, stop)
    part = tmp_path / ".out.unfinished" / "part-00001.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    calls: list[int] = []
    report = write_quantized(
        MODELS / LLAMA, tmp_path / "out", table, scheme, lambda done, total: calls.append(done)
    )
    assert report["resumed"] == 4 and calls == sorted(calls) and calls[-1] == 56
    write_quantized(MODELS / LLAMA, tmp_path / "plain", table, scheme)
    with (
        safe_open(tmp_path / "out" / "model.safetensors", "pt") as resumed,
        safe_open(tmp_path / "plain" / "model.safetensors", "pt") as other,
    ):
        differ = [n for n in resumed.keys() if resumed.get_tensor(n).tolist() != other.get_tensor(n).tolist()]  # noqa: SIM118
    assert len(differ) == 1 and ".layers.1." in differ[0]


def test_what_was_noted_of_layers_that_are_there_is_said_again(tmp_path: Path) -> None:
    with Unfinished(tmp_path / "out", {"quant": "nvfp4"}) as first:
        assert (first.notes(), first.notes(["a"]), first.notes(["a", "b"])) == ([], ["a"], ["a", "b"])
    with Unfinished(tmp_path / "out", {"quant": "nvfp4"}) as second:
        assert second.notes(["c", "b"]) == ["a", "b", "c"]
        second.finish()
    assert list((tmp_path / "out").iterdir()) == []


def test_a_part_that_was_cut_short_is_refused_by_name(tmp_path: Path) -> None:
    unfinished = Unfinished(tmp_path / "out", {"quant": "nvfp4"})
    with unfinished:
        (unfinished.folder / "part-00000.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
        with pytest.raises(CheckpointError, match=r"part-00000.safetensors is truncated or corrupt"):
            unfinished.read("00000")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with Unfinished(tmp_path / "out", {"quant": "nvfp4"}) as first:
        with pytest.raises(UsageError, match=f"{tmp_path}/out is being written by another process"):
            Unfinished(tmp_path / "out", {"quant": "nvfp4"})
        assert first.folder.exists()
    with (
        Unfinished(tmp_path / "out", {"quant": "nvfp4"}) as second,
        pytest.raises(BlockingIOError),
        open(second.folder / "lock", "rb") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
