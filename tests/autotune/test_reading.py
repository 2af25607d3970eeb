"""The time of reading a number of bytes: once per process, alternating, within memory, and with all bytes
read."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from gristmill.autotune import device, reading
from gristmill.autotune.reading import Reader, ReadError
from gristmill.autotune.rotation import Rotation
from gristmill.autotune.timing import CPU_COLD, GPU_COLD, MAX_SETS, list_count
from gristmill.kernel_registry.registry import default_registry

SIZE = 1 << 16


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    reading.forget()
    yield
    reading.forget()


def read(size: int = SIZE, count: int = 2, **more):
    return reading.reading("cpu", size, copies=count, captured=False, **more)


class Recorded:
    """A reader, honest or not, that records where it read."""

    def __init__(self, part: float = 1.0) -> None:
        self.places: list[int] = []
        self.part, self.found = part, 0.0

    def __call__(self, view: torch.Tensor) -> None:
        self.places.append(view.data_ptr())
        self.found = float(view[: int(len(view) * self.part)].sum())

    def alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            reading, "_readers", lambda data, count: [Reader("recorded", self, lambda: self.found)]
        )


def test_a_size_is_measured_once_in_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, true = [], reading._measured
    monkeypatch.setattr(reading, "_measured", lambda *what: measured.append(what) or true(*what))
    first = read()
    assert read() == first and measured == [("cpu", SIZE, 2, False)]
    assert first.us is not None and first.us > 0 and first.how in ("sum", "dot")
    read(count=1)
    read(2 * SIZE)
    assert len(measured) == 3
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    read()
    assert len(measured) == 4


def test_what_was_beaten_is_measured_once_more_and_the_faster_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [9.0, 5.0, 1.0]
    monkeypatch.setattr(
        reading, "_measured", lambda _, size, count, captured: reading.Reading(size, count, times.pop(0), "x")
    )
    assert read().us == 9.0 and read(beaten=9.5).us == 9.0 and len(times) == 2
    assert read(beaten=8.0).us == 5.0 and read(beaten=4.0).us == 5.0 and times == [1.0]
    times[:] = [5.0, 9.0]
    assert read(count=3).us == 5.0 and read(count=3, beaten=4.0).us == 5.0 and times == []


def test_cold_reads_go_around_all_copies_and_hot_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (1, 5):
        (recorded := Recorded()).alone(monkeypatch)
        read(SIZE, count)
        timed = recorded.places[1:]  # after the check
        assert len(set(timed)) == count and all(a != b for a, b in zip(timed, timed[1:], strict=False)) == (
            count > 1
        )
        inside = sorted(set(timed))
        # No two read the same place.
        assert all(b - a >= SIZE for a, b in zip(inside, inside[1:], strict=False))


@pytest.mark.parametrize("part", [0.5, 0.98, 0.0])
def test_a_kernel_that_reads_part_of_the_bytes_is_noticed(
    part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    Recorded(part).alone(monkeypatch)
    with pytest.raises(ReadError, match=f"recorded sums {SIZE} bytes .*does not read all of them"):
        read()


def test_the_fastest_reader_and_its_least_sample_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timed:
        def __init__(self, step, device, **_) -> None:
            step()
            self.times = [3.0, 2.5, 4.0] if recorded[-1] == "slow" else [9.0, 1.5, 9.0, 9.0]

        def sample(self) -> float:
            return self.times.pop(0) if self.times else 100.0

    recorded: list[str] = []

    def reader(name: str) -> Reader:
        total = torch.zeros(())
        return Reader(
            name, lambda view: recorded.append(name) or torch.sum(view, 0, out=total), lambda: float(total)
        )

    monkeypatch.setattr(reading, "Timed", Timed)
    monkeypatch.setattr(reading, "_readers", lambda data, count: map(reader, ("slow", "quick")))
    assert (read().us, read().how) == (1.5, "quick")


def test_what_does_not_fit_into_free_memory_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "free_bytes", lambda device: 8 * SIZE)
    assert read(SIZE, 4).us is not None
    reads = read(SIZE, 5)
    assert reads.us is not None  # memory that is already held counts as free
    reading.forget()
    reads = read(SIZE, 5)
    assert reads.us is None and reads.how == f"5 x {SIZE} bytes are more than half of the memory that is free"
    assert read(SIZE, 5, beaten=0.0) is reads and not reading._memory

    def none(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(reading, "_filled", none)
    assert read(SIZE, 3).us is None and not reading._memory


def test_much_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "cold_bytes", lambda device: 2 * SIZE)
    read(SIZE, 2)
    assert reading._memory["cpu"].nbytes == 2 * SIZE
    read(SIZE, 3)
    assert reading._memory["cpu"].nbytes == 3 * SIZE
    read(SIZE, 2)
    assert reading._memory["cpu"].nbytes == 3 * SIZE  # more than enough memory is held
    read(SIZE, 5)
    assert not reading._memory


def test_free_memory_is_that_of_the_machine_or_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 << 20 < device.free_bytes("cpu") < 1 << 50
    monkeypatch.setattr(device, "_group", lambda: (12345, 1 << 40))
    assert device.free_bytes("cpu") == 12345
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 20)
    monkeypatch.setattr(device, "on_device", lambda name: torch.no_grad())
    assert device.free_bytes("cuda:0") == 110


def test_arguments_rotate_over_as_many_lists_as_copies() -> None:
    assert (
        list_count(1, "cpu") == MAX_SETS
        and list_count(CPU_COLD, "cpu") == 2
        and list_count(10 * CPU_COLD, "cpu") == 2
    )
    assert (
        list_count(CPU_COLD // 5, "cpu") == 6
        and list_count(GPU_COLD // 4, "cuda:0") == 4
        and list_count(5, "cpu", hot=True) == 1
    )
    op = default_registry().op("rms_norm")
    kernel, problem = default_registry().kernel("rms_norm", "rms_norm_torch"), op.problem("m=1024,n=4096")
    for hot in (False, True):
        assert len(Rotation(op, kernel, problem, "cpu", hot=hot).sets) == list_count(
            op.cost(problem).bytes, "cpu", hot=hot
        )


@pytest.mark.parametrize("size", [64, 64 * 33, 1 << 14])
@pytest.mark.parametrize("fault", ["", "half of the programs", "half of each block", "twice the same"])
def test_the_triton_kernel_reads_everything(size: int, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in the interpreter on the data that fills a GPU's memory: it adds up to zero, so that nothing is
    written while the read is timed."""
    code = pytest.importorskip("gristmill.autotune._reading_triton")
    data = reading._filled("cpu:0", size // 4)
    original = data.clone()
    assert data.dtype == torch.int32 and int(data.sum()) == 0 and int((data != 0).sum()) == size // 4

    class Faulty:
        def __getitem__(self, grid):
            programs = max(1, grid[0] // 2) if fault == "half of the programs" else grid[0]
            return lambda view, sink, count, **how: code_read[(programs,)](
                *self.planted(view, sink, count), **how
            )

        def planted(self, view, sink, count):
            if fault == "half of each block":
                view = view.clone()
                view[len(view) // 2 :] = 0
            if fault == "twice the same":
                view = torch.cat([view[: len(view) // 2]] * 2)
            return view, sink, (count // 2 if fault == "half of the programs" else count)

    code_read = code.read
    monkeypatch.setattr(code, "read", Faulty())
    readers = list(reading._triton(data, len(data)))
    assert len(readers) == len(code.SHAPES)
    for reader in readers:
        reader.call(data)
        if not fault:
            assert reader.total() == 0
            reading._check(reader, data)
            data[-1] += 1  # the data no longer cancels: the program that reads it writes
            reader.call(data)
            assert reader.total() == 1
            data[-1] -= 1
        else:
            with pytest.raises(ReadError, match="does not read all of them"):
                reading._check(reader, data)
        assert torch.equal(data, original)


def test_a_gpus_readers_are_all_held_to_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    data = reading._filled("cpu:0", SIZE // 4)
    names = [
        reader.name for reader in reading._readers(data, len(data)) if reading._check(reader, data) is None
    ]
    assert names[0] == "sum" and "1024x1, 4 warps" in names and len(set(names)) == len(names) > 4
    monkeypatch.setattr(reading.importlib, "util", SimpleNamespace(find_spec=lambda name: None))
    assert [reader.name for reader in reading._readers(data, len(data))] == ["sum"]
