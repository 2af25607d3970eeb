"""Instructions of C++ CPU kernels, counted by valgrind's callgrind. Counts repeat to one part in ten thousand, however busy
the machine is.

A kernel is launched on the operation's inputs, and each of its calls into the native library is recorded with the memory that
its structs point to. `bench/replay.c` repeats these calls under callgrind, which counts from the first instruction of a call
to its last, on one thread. It compares the memory after each call with the recorded one.

Counts belong to a compiler and a code level, not to a machine: a file has a part for each. Callgrind does not support AVX-512.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gristmill.autotune.place import Place
from gristmill.kernel_registry.kernel import ConfigValue, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem

COUNTER = "callgrind"
LEVELS = ("base", "avx2", "neon")
"""Code levels whose instructions callgrind can run."""

SECONDS = 300.0

_TORCH = """#include <stdint.h>
int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void *), void *context) {
  if (begin < end) body(begin, end, context);
  return 0;
}
int32_t torch_get_num_threads(uint32_t *threads) { *threads = 1; return 0; }
"""
"""Replaces torch's library in the replay: its thread pool, with one thread."""


class CountError(ValueError):
    """Instructions could not be counted; the message says why."""


@dataclass(frozen=True)
class Call:
    """One call into the native library. structs: the words of each, a number, or (buffer, offset) for an address.
    before, after: the content of the buffers, as bytes.
    """

    symbol: str
    structs: tuple[tuple[int | tuple[int, int], ...], ...]
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]


def environment(here: Place) -> dict[str, str]:
    """What must be equal for counts to be comparable."""
    from gristmill.kernels.native import manifest

    libc = " ".join(platform.libc_ver()) or "unknown"
    return {
        "counter": COUNTER,
        "target": here.target.name,
        "compiler": str(manifest().get("compiler")),
        "libc": libc,
    }


def missing(here: Place) -> str:
    """Why instructions cannot be counted here; "" if they can."""
    level = here.target.name.partition(":")[2]
    if here.device != "cpu" or level not in LEVELS:
        names = ", ".join(f"cpu:{name}" for name in LEVELS)
        return f"callgrind runs no code of {here.target.name}; --target must be one of {names} that this processor supports"
    lacks = [name for name in ("valgrind", "cc") if shutil.which(name) is None]
    return (
        f"{' and '.join(lacks)} not installed; instructions are counted with valgrind, and a C compiler"
        if lacks
        else ""
    )


@dataclass(frozen=True)
class Recording:
    """One launch: its calls into the native library, and what was wrong with its result ("" if nothing)."""

    calls: tuple[Call, ...]
    wrong: str


def record(op: Op, kernel: Kernel, problem: Problem, here: Place) -> Recording:
    """Record the calls of one launch of `kernel`, on one thread, with poisoned outputs, and compare its result with the reference.

    CountError if `kernel` cannot be recorded.
    """
    import torch

    from gristmill.autotune.metrics import error_of
    from gristmill.autotune.verify import kernel_arguments, run_guarded, run_reference

    calls: list[Call] = []
    neutral, threads = op.inputs(problem, 0, "cpu"), torch.get_num_threads()
    references = run_reference(op, neutral)
    arguments = kernel_arguments(op, kernel, neutral)
    torch.set_num_threads(1)
    try:
        with _recording(calls):
            results, wrong = run_guarded(op, kernel, kernel.config(problem, here.target), arguments)
    finally:
        torch.set_num_threads(threads)
    if not calls:
        raise CountError(
            f"{kernel.name} made no call into the native library; only C++ kernels can be counted"
        )
    error, limit = error_of(op, problem, neutral, results, references), op.tolerance(problem).limit
    if not wrong and not error <= limit:
        wrong = f"error {error:.3g} is over the tolerance {limit:.3g}"
    return Recording(tuple(calls), wrong)


@contextmanager
def _recording(calls: list[Call]) -> Iterator[None]:
    """Record the calls of every entry of the native library."""
    from gristmill.kernels.native_call import CallEntry, Options

    original = CallEntry.at

    def recorded(entry: CallEntry, level: ConfigValue) -> tuple[Callable[..., int], Options]:
        function, options = original(entry, level)

        def call(*structs: bytes) -> int:
            return _keep(calls, f"{entry.name}__{level}", function, structs)

        return call, options

    CallEntry.at = recorded  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        CallEntry.at = original  # type: ignore[method-assign]


def _keep(calls: list[Call], symbol: str, function: Callable[..., int], structs: tuple[bytes, ...]) -> int:
    """Call `function`. Words of its structs that are addresses within a tensor are recorded as such."""
    regions = _tensors()
    used: list[tuple[int, int]] = []
    words = [struct.unpack(f"{len(given) // 8}q", given) for given in structs]
    recorded = tuple(tuple(_place(word, regions, used) or word for word in given) for given in words)
    before = tuple(ctypes.string_at(*region) for region in used)
    code = function(*structs)
    calls.append(Call(symbol, recorded, before, tuple(ctypes.string_at(*region) for region in used)))
    return code


def _place(
    address: int, regions: list[tuple[int, int]], used: list[tuple[int, int]]
) -> tuple[int, int] | None:
    """Where an address is: the number of its region among those in use, to which it is added, and the offset; None: in no region."""
    region = next((region for region in regions if region[0] <= address < region[0] + region[1]), None)
    if region is None:
        return None
    if region not in used:
        used.append(region)
    return used.index(region), address - region[0]


def _tensors() -> list[tuple[int, int]]:
    """Address and size in bytes of the memory of every live tensor."""
    import torch

    # type() instead of isinstance: some objects warn when their __class__ is read. Other subclasses, such as the FakeTensors that
    # torch.compile keeps, and functional tensors may have no memory of their own.
    tensors = [
        t
        for t in gc.get_objects()
        if type(t) in (torch.Tensor, torch.nn.Parameter)
        and t.device.type == "cpu"
        and t.numel()
        and not torch._is_functional_tensor(t)
    ]
    return sorted({(s.data_ptr(), s.nbytes()) for s in (t.untyped_storage() for t in tensors)})


def replayed(launches: Sequence[Sequence[Call]]) -> list[int]:
    """Instructions of each launch, all counted in one process under callgrind."""
    from gristmill.kernels.native import library_dir

    with tempfile.TemporaryDirectory(prefix="kernelbench-") as name:
        folder = Path(name)
        (folder / "torch.c").write_text(_TORCH)
        _run(
            [
                "cc",
                "-O1",
                "-shared",
                "-fPIC",
                "-Wl,-soname,libtorch_cpu.so",
                "-o",
                f"{name}/libtorch_cpu.so",
                f"{name}/torch.c",
            ],
            folder,
        )
        _run(["cc", "-O1", "-o", f"{name}/replay", str(Path(__file__).with_name("replay.c")), "-ldl"], folder)
        calls = [call for launch in launches for call in launch]
        (folder / "script").write_text(
            "".join(_script(call, folder / str(number)) for number, call in enumerate(calls))
        )
        _run(
            [
                "valgrind",
                "--tool=callgrind",
                f"--callgrind-out-file={name}/count",
                "--toggle-collect=counted",
                "--dump-after=counted",
                f"{name}/replay",
                str(library_dir() / "libgristmill_cpu.so"),
                f"{name}/script",
            ],
            folder,
        )
        counts = iter([_total(folder / f"count.{n + 1}") for n in range(len(calls))])
    return [sum(next(counts) for _ in launch) for launch in launches]


def _script(call: Call, stem: Path) -> str:
    """A call in the format of `replay.c`; the content of its buffers is written to files next to `stem`."""
    lines = [f"call {call.symbol}"]
    for number, (before, after) in enumerate(zip(call.before, call.after, strict=True)):
        paths = (Path(f"{stem}.{number}.before"), Path(f"{stem}.{number}.after"))
        for path, content in zip(paths, (before, after), strict=True):
            path.write_bytes(content)
        lines.append(f"buffer {len(before)} {paths[0]} {paths[1]}")
    for words in call.structs:
        lines.append(f"struct {len(words)}")
        lines += [
            f"pointer {word[0]} {word[1]}" if isinstance(word, tuple) else f"int {word}" for word in words
        ]
    return "\n".join([*lines, "go", ""])


def _run(command: Sequence[str], folder: Path) -> None:
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment
    )
    if done.returncode != 0:
        raise CountError(
            f"{command[0]} failed with status {done.returncode}: {' '.join(done.stderr.split()[-60:])}"
        )


def _total(path: Path) -> int:
    """The instructions of one dump of callgrind."""
    match = (
        re.search(r"^(?:totals|summary): (\d+)", path.read_text(), re.MULTILINE) if path.exists() else None
    )
    if match is None or not int(match[1]):
        raise CountError(f"callgrind wrote no count to {path.name}, expected one per call")
    return int(match[1])
