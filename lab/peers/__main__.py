"""`python -m lab.peers`: see the package. Progress goes to stderr, a table to stdout, or with --json the content of the result file."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import site
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gristmill.autotune.device import device_target
from gristmill.autotune.environment import environment
from gristmill.autotune.store import dump
from gristmill.bench import result_file
from gristmill.bench.result_text import rounded
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, StoreError
from lab import peers as package
from lab.peers import adapter
from lab.peers.adapter import Peer
from lab.peers.group import Cell, Group, groups
from lab.peers.page import table
from lab.peers.race import LostDeviceError, Race, Settings
from lab.peers.result import OtherRunError, ResultFile

DRY = Settings(device="cpu", rounds=2, settle=0.0, copies=2)
LOST = 3
"""The exit status after a fault of the device: the same command goes on with the next cell."""


def arguments(
    argv: Sequence[str], known: Mapping[str, Peer], all_groups: Mapping[str, Group]
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m lab.peers", description=str(package.__doc__).partition("\n")[0]
    )
    parser.add_argument("--groups", default=",".join(all_groups), help="by commas: %(default)s")
    parser.add_argument("--peers", default=",".join(known), help="by commas: %(default)s")
    parser.add_argument("--need", default="", help="peers, by commas, without which nothing is measured")
    parser.add_argument(
        "--where",
        default="",
        help="only cells whose model or problem has this text, or one of several: m=1,|m=4096,",
    )
    parser.add_argument("--cells", type=int, help="at most so many, spread over the groups")
    parser.add_argument("--out", type=Path, help="the result file; cells that it has are not measured again")
    parser.add_argument(
        "--store",
        type=Path,
        help="also add the times of our kernels in the cells of this run to this store",
    )
    parser.add_argument(
        "--retry", action="store_true", help="measure cells of the file again that compare nothing"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no further cell starts")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--others", type=int, default=2, help="our kernels beside the selected one")
    parser.add_argument(
        "--configurations",
        default="",
        help="kernels of ours, by commas, of which every configuration is a candidate",
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dry", action="store_true", help="tiny problems on the CPU")
    parser.add_argument("--json", action="store_true", help="print the content of the result file")
    options = parser.parse_args(argv)
    if options.rounds < 2:
        parser.error("--rounds: quartiles need at least 2")
    ours = {kernel.name for kernel in default_registry().all_kernels()}
    options.configurations = tuple(name for name in options.configurations.split(",") if name)
    if unknown := sorted({*options.configurations} - ours):
        parser.error(f"no kernels {', '.join(unknown)}")
    for name, there in (("groups", all_groups), ("peers", known)):
        chosen = [one for one in getattr(options, name).split(",") if one]
        if unknown := sorted({*chosen} - {*there}):
            parser.error(f"no {name} {', '.join(unknown)}; there are {', '.join(there)}")
        setattr(options, name, {one: there[one] for one in chosen})
    for name in (one for one in options.need.split(",") if one):
        if name not in options.peers:
            parser.error(f"--need {name}: it is not among the peers {', '.join(options.peers)}")
        if why := options.peers[name].absence or options.peers[name].failure:
            parser.error(f"--need {name}: {why}")
    return options


def read_path_files() -> None:
    """Read the .pth files in the folders of PYTHONPATH, which Python reads in its own folders only: one names the folder of CuTe DSL's packages."""
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if folder:
            site.addsitedir(folder)


def thinned(cells: Sequence[Cell], count: int | None) -> list[Cell]:
    """At most `count` cells, at equal distances."""
    if count is None or count >= len(cells):
        return list(cells)
    return [cells[place * len(cells) // count] for place in range(count)]


def line(row: Mapping[str, Any]) -> str:
    """A row on the screen."""
    times = [f"{name} {us:.2f}" for name, us, *_ in row["candidates"]]
    times += [f"{name} WRONG: {why}" for name, why in row["wrong"].items()]
    times += [f"{name} inexact: {why}" for name, why in row.get("inexact", {}).items()]
    times += [f"{name} refused: {why[:120]}" for name, why in row["refused"].items()]
    ratio = "nothing to compare" if row["ratio"] is None else f"{row['ratio']:.3f} of {row['peer']}"
    return f"{row['group']} {row['model']} {row['problem']}: {ratio}; {row.get('kernel')} selected; {', '.join(times)}"


def measure(
    cells: Iterable[tuple[Group, Cell]],
    race: Race,
    file: ResultFile,
    seconds: float,
    store: Path | None = None,
) -> int:
    """Measure the cells that the file lacks; the exit status: 0, `LOST`, or 1 if a cell raised something. The times of our kernels go to `store`."""
    status, begin, todo = 0, time.monotonic(), [pair for pair in cells if pair[1].name not in file.done]
    for number, (group, cell) in enumerate(todo, 1):
        took = time.monotonic() - begin
        if took > seconds:
            print(f"{len(todo) - number + 1} cells are left after {took:.0f} s", file=sys.stderr)
            break
        file.begin(cell)
        try:
            file.add(race.row(group, cell))
            if store is not None:
                result_file.replace(store, dump(race.times))
        except LostDeviceError as error:
            file.failed(cell, f"left the device unusable: {error}")
            print(f"{cell.name}: {error}; the same command goes on with the next cell", file=sys.stderr)
            return LOST
        except Exception as error:  # the others are measured nevertheless
            traceback.print_exc()
            file.failed(cell, f"{type(error).__name__}: {str(error)[:300]}")
            status = 1
        print(
            f"[{number}/{len(todo)} {time.monotonic() - begin:.0f} s] {line(file.rows[-1])}",
            file=sys.stderr,
            flush=True,
        )
    return status


def main(argv: Sequence[str] | None = None, known: Mapping[str, Peer] | None = None) -> int:
    """The program; `known` are the peers, those of `libraries` by default."""
    argv = sys.argv[1:] if argv is None else argv
    read_path_files()
    options = arguments(argv, adapter.peers() if known is None else known, groups())
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print
        status, data = run(options, argv)
    if data:
        print(json.dumps(rounded(data)) if options.json else table(data))
    return status


def run(options: argparse.Namespace, argv: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """The exit status, and the content of the result file; {} if there is none."""
    settings = DRY if options.dry else Settings(options.device, options.rounds, options.others)
    settings = replace(settings, configurations=options.configurations)
    chosen = [group.dry if options.dry else group for group in options.groups.values()]
    absent = {name: peer.absence for name, peer in options.peers.items()}
    here = [peer for name, peer in options.peers.items() if not absent[name]]
    versions = {name: absent[name] or peer.version for name, peer in options.peers.items()}
    about = environment(device_target(settings.device, Policy()), f"python -m lab.peers {shlex.join(argv)}")
    race = Race(settings, here)
    try:
        file = ResultFile(options.out, about, versions)
        if options.store is not None:
            race.times = Store.read(options.store)
    except (OtherRunError, StoreError) as error:
        print(error, file=sys.stderr)
        return 2, {}
    if options.retry:
        file.retry()
    for name, why in absent.items():
        if why:
            print(f"without {name}: {why}", file=sys.stderr)
    by_name = {group.name: group for group in chosen}
    texts = options.where.split("|")
    cells = [cell for group in chosen for cell in group.cells if any(text in cell.name for text in texts)]
    cells = thinned(cells, options.cells)
    status = measure(
        ((by_name[cell.group], cell) for cell in cells),
        race,
        file,
        options.seconds,
        options.store,
    )
    return status, file.data


if __name__ == "__main__":
    sys.exit(main())
