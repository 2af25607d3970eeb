"""Stores keep what was saved, within their capacity, for every process that may read it; records say whether they are whole."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_transfer import Store, stores
from gristmill.runtime.kv_transfer.config import KVTransfer
from gristmill.runtime.kv_transfer.file import FileStore
from gristmill.runtime.kv_transfer.host import HostStore
from gristmill.runtime.kv_transfer.identity import extend_keys, identity_of_files
from gristmill.runtime.kv_transfer.records import HEADER, RecordError, check, seal
from gristmill.runtime.kv_transfer.tiers import Tiers

KEYS = [bytes([i]) * 32 for i in range(8)]


def record(key: bytes, size: int = 100) -> memoryview:
    made = memoryview(bytearray(os.urandom(HEADER + size)))
    seal(made, key)
    return made


@pytest.fixture(params=["host", "file", "shm", "tiers"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Returns a store for four records."""
    size = 4 * (HEADER + 100)
    name = f"test-{os.getpid()}"
    text = {"host": f"host:{size}", "file": f"file:{tmp_path / 'kv'}:{size}", "shm": f"shm:{name}:{size}"}
    if request.param == "tiers":
        yield Tiers([HostStore(2 * (HEADER + 100)), FileStore(tmp_path / "slow", size)])
    else:
        yield KVTransfer.parse(text[request.param]).open()
    shutil.rmtree(Path("/dev/shm") / f"gristmill-{name}", ignore_errors=True)


def test_what_is_saved_is_loaded_until_there_is_no_room(store: Store) -> None:
    records = {key: record(key) for key in KEYS}
    for key in KEYS[:3]:
        store.save(key, records[key])
    store.save(KEYS[0], records[KEYS[0]])  # again: it takes no more room
    assert store.matched(KEYS) == [True] * 3 + [False] * 5
    into = memoryview(bytearray(HEADER + 100))
    for key in KEYS[:3]:
        assert store.load(key, into) == len(into) and into == records[key]
        check(into, key, len(into))
    assert store.load(KEYS[5], into) == 0
    for key in KEYS:
        store.save(key, records[key])
    found = store.matched(KEYS)
    assert 3 <= sum(found) <= 4 and found[7], "the capacity holds, and what was saved last is there"
    store.drop(KEYS[7])
    store.drop(KEYS[7])
    assert not store.matched(KEYS)[7]
    small = memoryview(bytearray(HEADER + 99))
    assert store.load(KEYS[6], small) == HEADER + 100 and not any(small), "a larger record is not read"
    store.close()


def test_files_are_shared_and_damaged_ones_are_found(tmp_path: Path) -> None:
    ours, theirs = FileStore(tmp_path, None), FileStore(tmp_path, None)
    made = record(KEYS[0])
    ours.save(KEYS[0], made)
    into = memoryview(bytearray(len(made)))
    assert theirs.matched(KEYS[:2]) == [True, False] and theirs.load(KEYS[0], into) == len(made)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]
    [file] = tmp_path.iterdir()
    file.write_bytes(bytes(made)[:-1])
    size = theirs.load(KEYS[0], into)
    with pytest.raises(RecordError, match=f"has {len(made) - 1} bytes, not {len(made)}"):
        check(into, KEYS[0], size)
    with pytest.raises(UsageError, match="cannot be used"):
        FileStore(file, None)


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    old, new = tmp_path / "a.part", tmp_path / "b.part"
    for file in (old, new):
        file.write_bytes(b"x")
    os.utime(old, (0, 0))
    FileStore(tmp_path, None)
    assert not old.exists() and new.exists()


def test_shared_memory_of_others_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gristmill.runtime.kv_transfer.shared_memory.FOLDER", tmp_path)
    KVTransfer.parse("shm:a:1MiB").open()
    (tmp_path / "gristmill-a").chmod(0o777)
    with pytest.raises(UsageError, match="belongs to another user, or others may write there"):
        KVTransfer.parse("shm:a:1MiB").open()


def test_readers_never_see_half_a_record(tmp_path: Path) -> None:
    store, key, size = FileStore(tmp_path, None), KEYS[0], 1 << 20
    records = [record(key, size) for _ in range(2)]
    store.save(key, records[0])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for each in records:
                store.save(key, each)

    thread = threading.Thread(target=write)
    thread.start()
    into = memoryview(bytearray(HEADER + size))
    try:
        for _ in range(30):
            check(into, key, FileStore(tmp_path, None).load(key, into))
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("place", [0, 7, 8, 15, 16, 47, 48, 79, HEADER, HEADER + 99])
def test_one_wrong_bit_is_found(place: int) -> None:
    made = record(KEYS[0])
    check(made, KEYS[0], len(made))
    made[place] ^= 1
    with pytest.raises(RecordError):
        check(made, KEYS[0], len(made))


def test_a_record_of_another_key_or_size_is_refused() -> None:
    made = record(KEYS[0])
    with pytest.raises(RecordError, match="is of another block"):
        check(made, KEYS[1], len(made))
    with pytest.raises(RecordError, match="has another format"):
        check(memoryview(bytes(made) + b"\0"), KEYS[0], len(made) + 1)


def test_keys_name_the_tokens_before_a_block_and_its_own(tmp_path: Path) -> None:
    def keys(tokens: list[int], root: bytes = b"r" * 32) -> list[bytes]:
        made: list[bytes] = []
        extend_keys(made, root, tokens[:9], 4)
        extend_keys(made, root, tokens, 4)
        return made

    first = keys(list(range(16)))
    assert len(first) == 4 and len(keys(list(range(19)))) == 4 and keys([1, 2, 3]) == []
    changed = keys([*range(5), 0, *range(6, 16)])
    assert [a == b for a, b in zip(first, changed, strict=True)] == [True, False, False, False]
    assert not set(first) & set(keys(list(range(16)), b"s" * 32))

    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="has no weight files"):
        identity_of_files(tmp_path)
    weights = tmp_path / "model.safetensors"
    seen = set()
    for data in (b"abc", b"abd", b"abda"):
        weights.write_bytes(data)
        seen.add(identity_of_files(tmp_path))
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    assert len(seen | {identity_of_files(tmp_path)}) == 4
    assert identity_of_files(tmp_path) == identity_of_files(tmp_path)


def test_large_files_are_sampled_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WHOLE", 1000), ("SAMPLE", 10), ("EVERY", 100)):
        monkeypatch.setattr(f"gristmill.runtime.kv_transfer.identity.{name}", value)
    file, data, seen = tmp_path / "m.gguf", bytearray(2050), set()
    for place in (0, 905, 2000, 2049):
        data[place] ^= 1
        file.write_bytes(data)
        seen.add(identity_of_files(file))
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KVTransfer.parse("tape:1GiB"), "unknown KV store 'tape:1GiB'; known: device, file, host"),
        (lambda: KVTransfer.parse("host"), r"host:SIZE': expected bytes, such as 4GiB or 512MiB, got ''"),
        (lambda: KVTransfer.parse("host:0"), "expected bytes"),
        (lambda: KVTransfer.parse("file:"), r"file:FOLDER\[:SIZE\]': the name is missing"),
        (lambda: KVTransfer.parse("shm:../x:1GiB"), "a name of letters, digits, _ and -, and a size"),
        (lambda: KVTransfer.parse("shm:pool"), "and a size"),
        (lambda: KVTransfer.parse("host:1GiB,save=1"), "expected save_after=, load=, timeout= or identity="),
        (lambda: KVTransfer.parse("host:1GiB,save_after=x"), "invalid literal"),
        (lambda: KVTransfer.parse("host:1GiB,load=1"), "load is yes or no, got '1'"),
        (lambda: KVTransfer.parse(3), "must be a KVTransfer or a text"),  # type: ignore[arg-type]
        (lambda: KVTransfer("host:1GiB"), "stores must be one or more texts"),
        (lambda: KVTransfer(["host:1GiB"], timeout=0), "timeout must be seconds, more than 0, got 0"),
        (lambda: KVTransfer(["host:1GiB"], save_after=0, load=False), "load must be True"),
        (lambda: KVTransfer(["host:1GiB"], save_after=-1), "an integer from 0 to 255, got -1"),
    ],
)
def test_wrong_settings_are_refused_by_name(make: Callable[[], KVTransfer], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make().open()


def test_settings_as_text() -> None:
    text = "host:8GiB+file:/var/kv:200GiB,save_after=1,load=no,timeout=0.5,identity=a"
    assert KVTransfer.parse(text) == KVTransfer(
        ("host:8GiB", "file:/var/kv:200GiB"), 1, False, 0.5, identity="a"
    )
    assert {"host", "file", "shm"} <= set(stores())


def test_what_only_the_slow_store_has_is_copied_to_the_fast_one(tmp_path: Path) -> None:
    fast, slow = HostStore(1000), FileStore(tmp_path, None)
    made = record(KEYS[0])
    slow.save(KEYS[0], made)
    into = memoryview(bytearray(len(made)))
    assert Tiers([fast, slow]).load(KEYS[0], into) == len(made)
    assert fast.matched(KEYS[:1]) == [True] and slow.matched(KEYS[:1]) == [True]
