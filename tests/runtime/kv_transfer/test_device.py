"""Blocks that go from the cache of one engine to that of another: the same ids, whatever is overwritten, damaged or killed meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_cache import host_memory
from gristmill.runtime.kv_cache.external import ExternalCache
from gristmill.runtime.kv_cache.size import make_cache
from gristmill.runtime.kv_transfer import digests, peer_carrier, scattered
from gristmill.runtime.kv_transfer.config import KVTransfer
from gristmill.runtime.kv_transfer.device import DevicePool
from gristmill.runtime.kv_transfer.digests import BlockDigests
from gristmill.runtime.kv_transfer.layout import Layout, Plane
from gristmill.runtime.kv_transfer.peer_carrier import OVERWRITTEN, UNREACHABLE, PeerCarrier
from gristmill.runtime.kv_transfer.peer_memory import Copy, PeerMemory, PeerMemoryError, copy_on_host, export
from gristmill.runtime.kv_transfer.prefill_decode import PrefillDecode
from gristmill.runtime.kv_transfer.scattered import ScatteredBlocks
from gristmill.runtime.kv_transfer.table import HEAD, SUFFIX, OwnTable, PeerTable
from gristmill.runtime.kv_transfer.transport import MappedSource
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from tests import forked
from tests.runtime.kv_transfer.test_transfer import PARAMS, PROMPTS, WHOLE, again, ids, status, windowed
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS

NAME = f"test-device-{os.getpid()}"
POOL = f"device:{NAME},save_after=1,timeout=60"
FOLDER = Path("/dev/shm") / f"gristmill-{NAME}"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    yield FOLDER
    shutil.rmtree(FOLDER, ignore_errors=True)


@pytest.fixture
def pair(make: Callable[..., LLM]) -> Callable[..., tuple[LLM, LLM]]:
    """Makes two engines of one pool, the first of which has computed the prompts."""

    def build(name: str = LLAMA, **options: Any) -> tuple[LLM, LLM]:
        first, second = (make(name, kv_transfer=POOL, **options) for _ in range(2))
        ids(first)
        return first, second

    return build


@pytest.fixture(params=["runs", "scattered"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How blocks are copied, whatever neighbours they have."""
    monkeypatch.setattr(scattered, "LONG_RUN", 1 << 60 if request.param == "scattered" else 0)
    return str(request.param)


@pytest.fixture(scope="module")
def expected(shared: Callable[..., LLM]) -> list[tuple[int, ...]]:
    return [done.token_ids for done in shared(LLAMA).generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("name", [LLAMA, DEEPSEEK, "fp8_token_head", "windows"])
def test_what_one_engine_has_another_one_copies(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    def engine(**options: Any) -> LLM:
        if name == "windows":
            return windowed(make, tmp_path, **options)
        if name == "fp8_token_head":
            return make(LLAMA, kv_dtype=name, **options)
        return make(name, **options)

    prompts = [[token % 300 for token in prompt] for prompt in PROMPTS]
    expected = ids(engine(), prompts)
    first, second = engine(kv_transfer=POOL), engine(kv_transfer=POOL)
    assert ids(first, prompts) == expected and first.engine.scheduler.lent
    assert ids(second, prompts) == expected
    found = status(second)
    assert found.loaded_tokens == found.queried_tokens == WHOLE and not found.failures
    ids(first, [[5]])
    if name != "windows":  # where blocks before the last window are not read
        rest = sum(first.engine.scheduler.lent.values())
        assert rest <= len(PROMPTS), "all but blocks that outputs have filled were read, and are lent no more"
    other = make(LLAMA, kv_transfer=POOL, quant="int8_ch")
    ids(other)
    assert status(other).loaded_tokens == 0, "blocks of other weights are not found"


def test_blocks_that_were_overwritten_are_computed(
    way: str, pair: Callable[..., tuple[LLM, LLM]], expected: list[tuple[int, ...]]
) -> None:
    first, second = pair()
    carrier = first.engine.transfer._carrier
    table, storage = carrier._table, first.engine.runner.cache.storage
    hashes: list[int] = []
    first.engine.scheduler.cache.extend_hashes(hashes, PROMPTS[0])
    block = first.engine.scheduler.cache.table(first.engine.scheduler.cache.match(hashes, PROMPTS[0]))[2]
    storage[-1, 1, block].mul_(-9)  # values of the last layer
    assert ids(second) == expected
    found = status(second)
    assert found.failures == {OVERWRITTEN: 1} and 0 < found.loaded_tokens < WHOLE, "those before it are used"
    for llm in (first, second):
        llm.engine.scheduler.check()

    with table._changes():
        table._columns.digests[block] = int(carrier._digests.of([block]))
    assert again(second) != expected, "with a digest that fits a wrong block is used"


def test_blocks_of_two_processes_in_parts(
    way: str, make: Callable[..., LLM], expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "PART", 250_000)  # two blocks
    begin, rest, third = (make(LLAMA, kv_transfer=POOL) for _ in range(3))
    ids(begin, [PROMPTS[0][:50]])
    assert ids(rest, PROMPTS[:1]) == expected[:1] and status(rest).loaded_tokens == 48
    assert ids(third, PROMPTS[:1]) == expected[:1]
    assert status(third).loaded_tokens == 96 and not status(third).failures
    for llm in (begin, rest):
        ids(llm, [[5]])
        assert sum(llm.engine.scheduler.lent.values()) <= 1, "both are told what was read"


def test_every_byte_and_its_place_have_a_part_in_the_digest() -> None:
    torch.manual_seed(0)
    tensors = [torch.randint(0, 255, shape, dtype=torch.uint8) for shape in ((4, 9, 64), (2, 9, 7))]
    hashed = BlockDigests(tensors)
    before = hashed.of(range(9))
    assert len(set(before.tolist())) == 9 and torch.equal(hashed.of([7, 1, 3]), before[[7, 1, 3]])
    for tensor in tensors:
        for row in range(tensor.shape[0]):
            for byte in range(tensor.shape[2]):
                tensor[row, 4, byte] ^= 1 << (byte % 8)
                changed = (hashed.of(range(9)) != before).tolist()
                tensor[row, 4, byte] ^= 1 << (byte % 8)
                assert changed == [place == 4 for place in range(9)]
    tensors[0][[0, 1], 4] = tensors[0][[1, 0], 4]
    assert hashed.of([4]) != before[4], "rows that were exchanged"
    tensors[0][[0, 1], 4] = tensors[0][[1, 0], 4]
    tensors[0][0, 4] = tensors[0][0, 4].roll(4)
    assert hashed.of([4]) != before[4], "words that were exchanged"


def test_blocks_are_kept_until_they_are_read_or_the_lease_ends(
    make: Callable[..., LLM], expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_carrier, "LEASE", 1000.0)
    first = make(LLAMA, kv_transfer=POOL, num_blocks=12)
    assert ids(first, PROMPTS[:1]) == expected[:1]
    lent = sum(first.engine.scheduler.lent.values())
    assert lent == 6
    monkeypatch.setattr(peer_carrier, "LEASE", 1.0)
    began = time.monotonic()
    for each in first.engine.transfer._carrier._lent:
        each.until = began + 1.0
    long = [token % 300 for token in range(9 * 16)]
    ids(first, [long])  # needs blocks that are lent
    assert 1.0 <= time.monotonic() - began < 60
    second = make(LLAMA, kv_transfer=f"device:{NAME},save_after=0,timeout=60")
    assert ids(second, PROMPTS[:1]) == expected[:1] and not status(second).failures
    assert status(second).loaded_tokens < 96, "what was evicted is not found"
    assert ids(first, PROMPTS[:1]) == expected[:1]
    assert again(second, PROMPTS[:1]) == expected[:1]
    assert status(second).loaded_tokens >= 96, "and it is found again when it was computed again"


def test_no_more_than_a_part_of_the_cache_is_lent(make: Callable[..., LLM]) -> None:
    llm = make(LLAMA, kv_transfer=POOL, num_blocks=16)
    ids(llm, [PROMPTS[0]])
    ids(llm, [PROMPTS[1]])
    ids(llm, [[5]])
    assert 0 < sum(llm.engine.scheduler.lent.values()) <= 8


def test_sleep_and_new_weights_withdraw_blocks(
    pair: Callable[..., tuple[LLM, LLM]], expected: list[tuple[int, ...]]
) -> None:
    first, second = pair()
    first.engine.sleep()
    assert ids(second) == expected and status(second).loaded_tokens == 0
    second.engine.sleep()
    first.engine.wake_up()
    second.engine.wake_up()
    assert not first.engine.scheduler.lent or ids(first, [[5]])
    assert ids(first) == expected and ids(second) == expected
    assert status(second).loaded_tokens == WHOLE, "from the memory that was allocated then"
    first.engine.update_weights(MODELS / LLAMA)
    assert ids(first) == expected and again(second) == expected
    assert status(second).loaded_tokens == WHOLE, "weights that were updated have blocks of their own"
    for llm in (first, second):
        llm.engine.scheduler.check()
        assert status(llm).failures == {}


def delay_copies(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Every copy from another process begins so much later."""
    real = PeerCarrier._copy

    def slow(*args: Any) -> Any:
        time.sleep(seconds)
        return real(*args)

    monkeypatch.setattr(PeerCarrier, "_copy", slow)


def test_requests_that_end_while_blocks_arrive_give_them_back(
    pair: Callable[..., tuple[LLM, LLM]], expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = pair()
    delay_copies(monkeypatch, 0.5)
    engine = second.engine
    for index, prompt in enumerate(PROMPTS[:2]):
        engine.add_request(str(index), prompt, PARAMS)
    deadline = time.monotonic() + 60
    while not engine.scheduler.lent and time.monotonic() < deadline:
        engine.step()
        engine.scheduler.check()
    assert engine.scheduler.lent and [ended.id for ended in engine.abort(["0"])] == ["0"]
    answer: list[int] = []
    while engine.has_unfinished():
        for output in engine.step():
            answer += output.new_ids
        engine.scheduler.check()
    assert tuple(answer) == expected[1] and not engine.scheduler.lent


def test_a_copy_that_fails_costs_a_computation(
    way: str,
    pair: Callable[..., tuple[LLM, LLM]],
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, second = pair()
    with monkeypatch.context() as patch:
        closed: list[MappedSource] = []

        def fails(*_: Any) -> None:
            raise PeerMemoryError("the link is down")

        patch.setattr(MappedSource, "start" if way == "runs" else "planes", fails)
        patch.setattr(MappedSource, "close", lambda source: closed.append(source))
        assert ids(second) == expected and closed, "what was begun has ended before blocks are given back"
    assert status(second).failures == {"the store raised an error": 3} and status(second).loaded_tokens == 0
    second.engine.scheduler.check()
    assert again(second) == expected and status(second).loaded_tokens == WHOLE


def test_an_arrival_that_is_late_is_not_waited_for(
    pair: Callable[..., tuple[LLM, LLM]], expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = pair()
    delay_copies(monkeypatch, 1)
    object.__setattr__(second.engine.transfer.config, "timeout", 0.3)
    assert ids(second, PROMPTS[:1]) == expected[:1]
    assert status(second).failures == {"no answer within the timeout": 1}
    assert second.engine.transfer._loads.wait(60)
    assert ids(second, [[5]]) and not second.engine.transfer._arriving


PROGRAM = """
import sys
from gristmill import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="fp32", num_blocks=64, kv_transfer=sys.argv[2], policy=sys.argv[3] or None)
llm.generate([[token % 300 for token in range(100)]], SamplingParams(max_tokens=1))
assert llm.engine.flush_kv_transfer(60)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def peer() -> Iterator[forked.Process]:
    """A process that has computed a prompt."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = forked.start(["-c", PROGRAM, str(MODELS / LLAMA), POOL, ""], environment)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_process_that_is_killed_has_nothing(peer: forked.Process, make: Callable[..., LLM]) -> None:
    prompt = [[token % 300 for token in range(100)]]
    expected = ids(make(LLAMA), prompt)
    llm = make(LLAMA, kv_transfer=f"device:{NAME},timeout=60")
    assert ids(llm, prompt) == expected and status(llm).loaded_tokens == 96
    peer.send_signal(signal.SIGSTOP)  # copies need nothing of it
    assert again(llm, prompt) == expected and status(llm).loaded_tokens == 192
    [table] = [path for path in FOLDER.iterdir() if path.stem != llm.engine.transfer._carrier._table.name]
    peer.kill()
    peer.wait()
    assert again(llm, prompt) == expected and not table.exists()
    assert status(llm).loaded_tokens == 192 and not status(llm).failures


def test_prefill_and_decode_in_two_processes(shared: Callable[..., LLM]) -> None:
    async def main() -> tuple[list[tuple[int, ...]], int]:
        answers = []
        options = {"device": "cpu", "dtype": "fp32", "num_blocks": 64}
        async with PrefillDecode(MODELS / LLAMA, POOL, **options) as front:
            for prompt in PROMPTS[:3]:
                got: list[int] = []
                async for chunk in front.stream(prompt, PARAMS):
                    got += chunk.token_ids
                answers.append(tuple(got))
            [state] = await front.decode.status()
            return answers, state.kv_transfer.loaded_tokens

    answers, loaded = asyncio.run(main())
    expected = [
        done.token_ids
        for done in shared(LLAMA).generate(PROMPTS[:3], SamplingParams(max_tokens=8, ignore_eos=True))
    ]
    assert answers == expected and loaded == WHOLE
    deadline = time.monotonic() + 60
    while any(PeerTable(path).alive() for path in FOLDER.glob(f"*{SUFFIX}")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not list(FOLDER.iterdir()), "what processes leave that are ended is removed"


@pytest.mark.parametrize("change", ["memory", "planes", "size", "pid", "text", "length", "magic"])
def test_a_damaged_table_is_not_used(
    change: str, pair: Callable[..., tuple[LLM, LLM]], expected: list[tuple[int, ...]]
) -> None:
    first, second = pair()
    table = first.engine.transfer._carrier._table
    told = json.loads(table._memory[16 : table._memory.find(b"\0", 16)])
    if change in ("memory", "planes"):
        told[change] = [[1, 2, 3]]
    if change == "size":
        told["memory"][0]["bytes"] *= 2
    if change == "pid":
        told["memory"][0]["pid"] = 1 << 40
    table.describe(told)
    if change == "text":
        table._memory[16] = 0
    if change == "length":
        table._memory[8:16] = b"\xff" * 8
    if change == "magic":
        table._memory[0] ^= 1
    assert ids(second) == expected
    found = status(second)
    assert found.failures.keys() == {UNREACHABLE} and found.loaded_tokens == 0
    assert again(second) == expected and status(second).failures == found.failures, "and not tried again"


def test_tables_say_where_keys_are(tmp_path: Path) -> None:
    own = OwnTable(tmp_path, 1000)
    keys = [os.urandom(32) for _ in range(600)]
    own.publish(range(7, 607), keys, np.arange(600))
    own.withdraw([8, 999])
    with pytest.raises(ValueError, match="does not fit"):
        own.describe({"much": "x" * HEAD})
    reader = PeerTable(tmp_path / f"{own.name}{SUFFIX}")
    assert reader.alive() and reader.find(keys).tolist() == [-1] * 600, "nothing is read before refresh"
    reader.refresh()
    found = reader.find([*keys, bytes(32), os.urandom(32)])
    assert found.tolist() == [7, -1, *range(9, 607), -1, -1]
    assert reader.digests(np.array([7, 9])).tolist() == [0, 2]
    reader.acknowledge(np.array([9]))
    assert own.were_read([7, 9]).tolist() == [False, True]
    own.publish([9], keys[:1], np.arange(1))
    assert not own.were_read([9]).any()
    own.close()
    assert not list(tmp_path.iterdir()) and not reader.alive()
    (tmp_path / f"a{SUFFIX}").write_bytes(bytes(5000))
    with pytest.raises(PeerMemoryError, match="no table of blocks"):
        PeerTable(tmp_path / f"a{SUFFIX}")


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"bytes": 4097}, "has 4096 bytes, said to be 4097"),
        ({"bytes": 0}, "said to be 0"),
        ({"bytes": "x"}, "bytes must be a number of 0 or more, got 'x'"),
        ({"file": -1}, "file must be a number"),
        ({"file": 1 << 30}, "cannot be opened"),
        ({"file": 0}, "is no memory that keeps its size|cannot be opened"),
    ],
)
def test_memory_of_others_is_checked_before_it_is_mapped(told: dict[str, Any], message: str) -> None:
    memory = host_memory.zeros(4096)
    memory[17] = 9
    whole = export(memory)
    mapped = PeerMemory(whole, CPU)
    into = torch.zeros(64, dtype=torch.uint8)
    copy_on_host([Copy(into.data_ptr(), 16, mapped.address + 16, 32, 2, 3)])
    assert into.nonzero().tolist() == [[1]] and into[1] == 9
    mapped.close()
    with pytest.raises(PeerMemoryError, match=message):
        PeerMemory({**whole, **told}, CPU)
    with pytest.raises(PeerMemoryError, match="did not allocate"):
        export(torch.zeros(4))


def test_neighbours_on_both_sides_are_one_copy() -> None:
    mine, theirs = Layout([Plane(3, 1000, 10)], 100), Layout([Plane(3, 2000, 10)], 200)
    copies = list(mine.copies([0], [4, 5, 6, 9, 8], theirs, [50_000], [7, 8, 9, 10, 11]))
    assert [(c.target, c.source, c.width) for c in copies] == [
        (40, 50_070, 30),
        (90, 50_100, 10),
        (80, 50_110, 10),
    ]
    assert {(c.target_pitch, c.source_pitch, c.rows) for c in copies} == {(1000, 2000, 3)}
    with pytest.raises(PeerMemoryError, match="do not fit"):
        Layout([Plane(3, 999, 10)], 100)
    with pytest.raises(PeerMemoryError, match="is said to be in 2999 bytes"):
        mine.check([2999])
    with pytest.raises(PeerMemoryError, match="a plane is three numbers"):
        Layout.parse([[1, 2]], 100)


def test_scattered_blocks_are_copied_and_hashed_at_once(policy: Policy) -> None:
    """From planes with longer rows, to the bit; a word that is missing in a sum is another digest."""
    torch.manual_seed(0)
    mine, theirs = (
        [torch.randint(0, 255, s, dtype=torch.uint8) for s in ((4, n, 64), (2, n, 12))] for n in (9, 13)
    )
    hashed, of_theirs = BlockDigests(mine), BlockDigests(theirs)
    ways = ScatteredBlocks(mine, hashed, policy)
    blocks, into = np.array([12, 3, 0, 7]), np.array([2, 8, 1, 4])
    sums = ways.copy([plane.view(torch.int32) for plane in theirs], blocks, into)
    for ours, other in zip(mine, theirs, strict=True):
        assert torch.equal(ours[:, into], other[:, blocks])
    assert torch.equal(hashed.digests(sums), of_theirs.of(blocks.tolist()))
    sums[0, 1] ^= 1
    assert (hashed.digests(sums) == hashed.of(into.tolist())).tolist() == [True, False, True, True]
    odd = [torch.zeros(2, 9, 7, dtype=torch.uint8)]
    assert not ScatteredBlocks.takes(odd) and ScatteredBlocks.takes(mine)


def test_what_is_scattered(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    """Runs of fewer bytes in a row than `LONG_RUN`, on either side."""
    monkeypatch.setattr(scattered, "LONG_RUN", 256)
    planes = [torch.zeros(1, 16, 64, dtype=torch.uint8)]
    ways = ScatteredBlocks(planes, BlockDigests(planes), policy)
    neighbours, pairs = np.arange(8), np.array([0, 1, 4, 5, 8, 9, 12, 13])
    assert not ways.are(neighbours, neighbours + 3)
    assert (
        ways.are(pairs, neighbours) and ways.are(neighbours, pairs) and ways.are(neighbours[::-1], neighbours)
    )
    assert ways.are(neighbours[:3], neighbours[:3]), "of few blocks"


def test_what_cannot_be_shared_is_refused(shared: Callable[..., LLM], make: Callable[..., LLM]) -> None:
    llm = shared(LLAMA)
    runner, root = llm.engine.runner, bytes(32)
    external = ExternalCache(runner.model, make_cache(runner.model, 8, 16).layers)
    FOLDER.mkdir(mode=0o700)
    with pytest.raises(UsageError, match="did not allocate"):
        DevicePool(FOLDER).carrier(external, CPU, llm.engine.scheduler, root)
    with pytest.raises(UsageError, match="cannot be combined with tensor_parallel"):
        make(LLAMA, tensor_parallel=2, kv_transfer=POOL)
    with pytest.raises(UsageError, match="keeps no copies of blocks, so it cannot be combined"):
        KVTransfer.parse(f"host:1GiB+device:{NAME}")
    with pytest.raises(
        UsageError, match="a name of letters, digits, _ and -, and nothing or nixl after it, got '../x'"
    ):
        KVTransfer.parse("device:../x").open()
    with pytest.raises(UsageError, match="and nothing or nixl after it, got 'x:tape'"):
        KVTransfer.parse("device:x:tape").open()
    FOLDER.chmod(0o777)
    with pytest.raises(UsageError, match="belongs to another user, or others may write there"):
        KVTransfer.parse(f"device:{NAME}").open()
