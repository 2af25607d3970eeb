"""Records in memory of other processes, through NIXL: read whole, and missed without a hang when the process has ended. Where there is no NIXL,
the store is refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_transfer.config import KVTransfer
from gristmill.runtime.kv_transfer.nixl import NixlStore
from gristmill.runtime.kv_transfer.records import HEADER, RecordError, check, seal
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from tests.runtime import oracle
from tests.runtime.oracle import LLAMA

needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="needs nixl")
KEYS = [bytes([i]) * 32 for i in range(8)]
SIZE = HEADER + (1 << 16)
PROGRAM = """
import os, sys
from pathlib import Path
from gristmill.runtime.kv_transfer.nixl import NixlStore
from gristmill.runtime.kv_transfer.records import HEADER, seal
store = NixlStore(Path(sys.argv[1]), 1 << 20)
for i in range(6):
    record = memoryview(bytearray(os.urandom(HEADER + (1 << 16))))
    seal(record, bytes([i]) * 32)
    store.save(bytes([i]) * 32, record)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has six records."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n", "and no other output"
        yield process
        process.kill()


@pytest.mark.skipif(find_spec("nixl") is not None, reason="nixl is installed")
def test_without_the_package_the_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"needs NIXL: pip install nixl, or use file:FOLDER"):
        KVTransfer.parse(f"nixl:{tmp_path}:1MiB").open()


def test_the_size_is_needed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the size is missing"):
        KVTransfer.parse(f"nixl:{tmp_path}").open()


@needs_nixl
def test_records_of_another_process(peer: subprocess.Popen[str], tmp_path: Path) -> None:
    store, into = NixlStore(tmp_path, 3 * SIZE), memoryview(bytearray(SIZE))
    assert store.matched(KEYS) == [True] * 6 + [False] * 2
    for key in KEYS[:3]:
        assert store.load(key, into) == SIZE
        check(into, key, SIZE)
    assert store.load(KEYS[7], into) == 0 and store.load(KEYS[0], into[:-1]) == SIZE

    for key in KEYS[6:]:
        record = memoryview(bytearray(os.urandom(SIZE)))
        seal(record, key)
        store.save(key, record)
        assert store.load(key, into) == SIZE and into == record
    for key in KEYS[:3]:  # the memory is used again, from its front
        seal(record, key)
        store.save(key, record)
    assert store.matched(KEYS) == [True] * 6 + [False] * 2

    small = memoryview(bytearray(os.urandom(HEADER + 100)))
    for i in range(2000):  # of several sizes
        store.save(KEYS[i % 3], small if i % 7 else record)
        ends = sorted((offset, offset + size) for offset, size in store._places.values())
        assert all(a[1] <= b[0] for a, b in zip(ends, ends[1:], strict=False)) and ends[-1][1] <= 3 * SIZE

    entry = tmp_path / f"{KEYS[5].hex()}.at"
    entry.write_bytes((tmp_path / f"{KEYS[4].hex()}.at").read_bytes())
    with pytest.raises(RecordError, match="is of another block"):
        check(into, KEYS[5], store.load(KEYS[5], into))
    for wrong in ('["../x", 1, 2]', "[]", "x", f'["{"0" * 32}", 1, 2]'):
        entry.write_text(wrong)
        assert store.load(KEYS[5], into) == 0 and not entry.exists()
    store.close()
    assert not [
        name for name in os.listdir(tmp_path) if name in (f"{store._name}.agent", f"{KEYS[0].hex()}.at")
    ]


@needs_nixl
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_does_not_answer_is_a_miss(
    sent: signal.Signals, peer: subprocess.Popen[str], tmp_path: Path
) -> None:
    store, into = NixlStore(tmp_path, SIZE), memoryview(bytearray(SIZE))
    peer.send_signal(sent)
    if sent is signal.SIGKILL:
        peer.wait()
    began = time.monotonic()
    for key in KEYS[:6]:
        size = store.load(key, into)
        if size:  # memory that the host's processes share outlives them for a while
            check(into, key, size)
        else:
            assert not store.matched([key])[0]
    assert time.monotonic() - began < 8
    store.close()


@needs_nixl
def test_engines_find_each_others_blocks(make: Callable[..., LLM], tmp_path: Path) -> None:
    params, prompt = SamplingParams(max_tokens=8, ignore_eos=True), [oracle.window(0)[:100]]
    first, second = (make(LLAMA, kv_transfer=f"nixl:{tmp_path}:64MiB,save_after=1") for _ in range(2))
    expected = first.generate(prompt, params)[0].token_ids
    assert first.engine.flush_kv_transfer(10)
    assert second.generate(prompt, params)[0].token_ids == expected
    status = second.engine.status().kv_transfer
    assert status is not None and status.loaded_tokens == 96 and not status.failures
    first.close()
    second.engine.reset_prefix_cache()
    assert second.generate(prompt, params)[0].token_ids == expected


@needs_nixl
def test_caches_of_two_engines(make: Callable[..., LLM]) -> None:
    name = f"test-nixl-{os.getpid()}"
    params, prompt = SamplingParams(max_tokens=8, ignore_eos=True), [oracle.window(0)[:100]]
    try:
        first, second = (make(LLAMA, kv_transfer=f"device:{name}:nixl,save_after=1") for _ in range(2))
        expected = first.generate(prompt, params)[0].token_ids
        assert first.engine.flush_kv_transfer(10)
        assert second.generate(prompt, params)[0].token_ids == expected
        status = second.engine.status().kv_transfer
        assert status is not None and status.loaded_tokens == 96 and not status.failures
        mapped = make(LLAMA, kv_transfer=f"device:{name}")
        assert mapped.generate(prompt, params)[0].token_ids == expected
        assert mapped.engine.status().kv_transfer.loaded_tokens == 0, "both sides need the same transport"
        first.close()
        second.engine.reset_prefix_cache()
        assert second.generate(prompt, params)[0].token_ids == expected
        assert second.engine.status().kv_transfer.loaded_tokens == 96
    finally:
        shutil.rmtree(Path("/dev/shm") / f"gristmill-{name}", ignore_errors=True)
