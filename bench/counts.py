"""Instructions of C++ CPU kernels, counted by valgrind's callgrind. Counts repeat to one part in ten thousand, however busy
the machine is.

A kernel is launched on the operation's inputs, and each of its calls into the native library is recorded: the struct of the call, its
options, and the memory of its tensors. `bench/replay.c` repeats these calls under callgrind, which counts from the first instruction of
a call to its last, on one thread. It compares the memory after each call with the recorded one.

Counts belong to a compiler and a code level, not to a machine: a file has a part for each. Callgrind does not support AVX-512.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gristmill.autotune.place import Place
from gristmill.kernel_registry.call import Call
from gristmill.kernel_registry.call_struct import fields
from gristmill.kernel_registry.kernel import Config, Kernel
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
class NativeCall:
    """A call of an entry. words: of its struct, each a number, or (buffer, offset) for an address.
    before, after: the content of the buffers.
    """

    symbol: str
    words: tuple[int | tuple[int, int], ...]
    options: tuple[int, ...]
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

    calls: tuple[NativeCall, ...]
    wrong: str


def record(op: Op, kernel: Kernel, problem: Problem, here: Place) -> Recording:
    """Record the calls of one launch of `kernel`, on one thread, with poisoned outputs, and compare its result with the reference.

    CountError if `kernel` cannot be recorded.
    """
    import torch

    from gristmill.autotune.metrics import error_of
    from gristmill.autotune.verify import kernel_arguments, run_guarded, run_reference

    calls: list[NativeCall] = []
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
def _recording(calls: list[NativeCall]) -> Iterator[None]:
    """Record the calls of every entry of the native library."""
    from gristmill.kernels.native_call import CallEntry

    original = CallEntry.cpu

    def recorded(entry: CallEntry, config: Config, call: Call) -> None:
        buffers, options = _buffers(call), entry.at(config["level"])[1]
        words = _words(entry.op, entry.pack(call), buffers)
        values = struct.unpack(f"{len(options.names)}Q", options.pack(config))
        before = tuple(ctypes.string_at(*buffer) for buffer in buffers)
        original(entry, config, call)
        after = tuple(ctypes.string_at(*buffer) for buffer in buffers)
        calls.append(NativeCall(f"{entry.name}__{config['level']}", words, values, before, after))

    CallEntry.cpu = recorded  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        CallEntry.cpu = original  # type: ignore[method-assign]


def _buffers(call: Call) -> list[tuple[int, int]]:
    """Address and size in bytes of the memory of the call's tensors."""
    from gristmill.autotune.guard import tensors

    storages = (tensor.untyped_storage() for value in call.values() for tensor in tensors(value))
    return list(
        dict.fromkeys((storage.data_ptr(), storage.nbytes()) for storage in storages if storage.nbytes())
    )


def _words(op: Op, packed: bytes, buffers: Sequence[tuple[int, int]]) -> tuple[int | tuple[int, int], ...]:
    """The words of a struct, addresses within `buffers` as (buffer, offset)."""
    words: list[int | tuple[int, int]] = []
    codes = "".join(field.code for field in fields(op))
    for code, word in zip(codes, struct.unpack(f"{len(codes)}Q", packed), strict=True):
        places = [(i, word - start) for i, (start, size) in enumerate(buffers) if 0 <= word - start < size]
        words.append(places[0] if places and code == "P" else word)
    return tuple(words)


def replayed(launches: Sequence[Sequence[NativeCall]]) -> list[int]:
    """Instructions of each launch, all counted in one process under callgrind."""
    from gristmill.kernels.native import library_dir

    calls = [call for launch in launches for call in launch]
    with tempfile.TemporaryDirectory(prefix="kernelbench-") as name:
        folder = Path(name)
        (folder / "torch.c").write_text(_TORCH)
        (folder / "calls.h").write_text("".join(_source(call, i, folder) for i, call in enumerate(calls)))
        replay = str(Path(__file__).with_name("replay.c"))
        stub = ["-shared", "-fPIC", "-Wl,-soname,libtorch_cpu.so", "-o", "libtorch_cpu.so", "torch.c"]
        _run(["cc", "-O1", *stub], folder)
        _run(["cc", "-O1", "-I.", "-o", "replay", replay, "-ldl"], folder)
        counting = ["--callgrind-out-file=count", "--toggle-collect=counted", "--dump-after=counted"]
        library = str(library_dir() / "libgristmill_cpu.so")
        _run(["valgrind", "--tool=callgrind", *counting, "./replay", library], folder)
        counts = iter([_total(folder / f"count.{n + 1}") for n in range(len(calls))])
    return [sum(next(counts) for _ in launch) for launch in launches]


def _source(call: NativeCall, number: int, folder: Path) -> str:
    """A call as a statement in C, for `replay.c`; the content of its buffers is written to files."""
    buffers, after = [], []
    for i, contents in enumerate(zip(call.before, call.after, strict=True)):
        for kind, content in zip(("before", "after"), contents, strict=True):
            (folder / f"{number}.{i}.{kind}").write_bytes(content)
        buffers.append(f'load({len(contents[0])}, "{number}.{i}.before")')
        after.append(f'compare(b[{i}], {len(contents[1])}, "{number}.{i}.after", "{call.symbol}");')
    words = [
        f"(uint64_t)(b[{word[0]}] + {word[1]})" if isinstance(word, tuple) else f"{word:#x}"
        for word in call.words
    ]
    options = [f"{option:#x}" for option in call.options] or ["0"]
    return f"""{{
  char* b[] = {{{", ".join(buffers)}}};
  const uint64_t call[] = {{{", ".join(words)}}}, options[] = {{{", ".join(options)}}};
  replay(library, "{call.symbol}", call, options);
  {" ".join(after)}
}}
"""


def _run(command: Sequence[str], folder: Path) -> None:
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment
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
