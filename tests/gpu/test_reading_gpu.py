"""The time of reading a number of bytes on a GPU: plausible beside the device's ceilings, cold when cold is
requested, and the floor of rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gristmill.autotune import reading
from gristmill.autotune.floor import ceilings
from gristmill.autotune.place import place
from gristmill.autotune.reading import ReadError
from gristmill.autotune.timing import list_count
from gristmill.bench.compare import Case, add_floors, compare
from gristmill.bench.statistics.verdict import Rule
from gristmill.bench.timings import kernel_rows
from gristmill.kernel_registry.registry import default_registry

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
DEVICE = "cuda:0"
OP = default_registry().op("rms_norm")


@pytest.fixture(autouse=True)
def fresh(policy_file) -> Iterator[None]:
    policy_file()
    reading.forget()
    yield
    reading.forget()


def read(size: int, *, hot: bool = False, captured: bool = True, **more) -> float:
    actual = reading.reading(
        DEVICE, size, copies=list_count(size, DEVICE, hot=hot), captured=captured, **more
    )
    assert actual.us is not None, actual
    return actual.us


def test_many_bytes_take_what_the_bandwidth_says_and_few_take_what_a_launch_does() -> None:
    limits = ceilings(DEVICE)
    large = 512 << 20
    assert 0.85 < large / limits.read_gbs / 1e3 / read(large) < 1.1
    small = 24 << 10
    assert 0.8 * limits.launch_us < read(small) < 10 * limits.launch_us
    assert read(small) > 10 * small / limits.read_gbs / 1e3  # a latency that bytes / bandwidth leaves out
    assert read(small) < read(small, captured=False)  # a call from the host takes longer than one in a graph


def test_cold_reads_come_from_memory() -> None:
    size = torch.cuda.get_device_properties(DEVICE).L2_cache_size // 4
    cold, hot = read(size), read(size, hot=True)
    assert hot < 0.98 * cold and size / cold / 1e3 < 1.15 * ceilings(DEVICE).read_gbs


def test_bytes_are_read_as_fast_as_a_device_wide_sum_reads_them() -> None:
    for size in (1 << 20, 8 << 20, 64 << 20):
        us_of = {}
        count, copies = size // 4, list_count(size, DEVICE)
        data = reading._filled(DEVICE, count * copies)
        views = [*data.view(copies, count)]
        for reader in reading._readers(data, count):
            us_of[reader.name] = reading._least(reader, views, DEVICE, True)
        print(
            f"{size} bytes:",
            {name: round(us, 3) for name, us in sorted(us_of.items(), key=lambda item: item[1])},
        )
        assert min(us_of.values()) < us_of["sum"] * 1.02


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_kernel_that_leaves_programs_out_is_noticed(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from gristmill.autotune import _reading_triton as code

    true = code.read

    class Short:
        def __getitem__(self, grid):
            return true[(max(1, int(grid[0] * share)),)]

    monkeypatch.setattr(code, "read", Short())
    with pytest.raises(ReadError, match="does not read all of them"):
        read(1 << 20)


def test_what_does_not_fit_is_taken_from_the_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "free_bytes", lambda device: 1 << 20)
    kernel, problem = default_registry().kernel("rms_norm", "rms_norm_triton"), OP.problem("m=512,n=4096")
    row = kernel_rows(OP, problem, [kernel], place(None), seconds=0.1, all_timings=False)[0]
    cost = OP.cost(problem)
    assert row["floor_source"].startswith(f"read bandwidth for {cost.bytes} bytes: ")
    assert row["floor_us"] == pytest.approx(cost.bytes / ceilings(DEVICE).read_gbs / 1e3)


def test_no_row_is_faster_than_its_floor() -> None:
    kernels = [default_registry().kernel("rms_norm", f"rms_norm_{name}") for name in ("triton", "torch")]
    for text, bound in (("m=1,n=4096", "launch"), ("m=64,n=4096", "launch"), ("m=4096,n=8192", "memory")):
        problem = OP.problem(text)
        for row in kernel_rows(OP, problem, kernels, place(None), seconds=0.1, all_timings=False):
            # These few bytes are read in the time of any launch.
            source = "launch" if text == "m=1,n=4096" else f"read kernel of {OP.cost(problem).bytes} bytes, "
            assert row["floor_source"].startswith(source), row["floor_source"]
            assert 0.02 < row["fraction_of_floor"] < 1.05 and row["bound"] == bound, row
    cases = [Case(OP, OP.problem("m=4096,n=8192"), kernels[1], (kernels[0],))]
    rows = compare(cases, place(None), Rule(), seconds=5)
    add_floors(rows, cases, place(None))
    assert 0.3 < rows[0].floor["fraction_of_floor"] < 1.05
