"""kernelbench prove: a report of what matches the reference on this device, as evidence for others."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import click

from gristmill import console
from gristmill.autotune.place import Place
from gristmill.bench import options
from gristmill.bench.examples import Example, examples
from gristmill.bench.out_file import OutFile, unwritable
from gristmill.kernel_registry.registry import default_registry

COUNTING = ("failed", "proven")


@click.command()
@options.target
@click.option("--op", "op_name", metavar="OP", help="Only this operation.")
@click.option("--kernel", "kernel_name", metavar="K", help="Only this kernel.")
@click.option(
    "--out", type=OutFile(), metavar="FILE", help="The report. Default: proof_TARGET.json in this folder."
)
@options.workers(1, "Child processes that compile and verify at a time.")
@click.option(
    "--renew",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="A report of such a device: run what it does not prove, and keep the rest.",
)
@click.option(
    "--check",
    "files",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Run nothing: say for which kernels a report counts with their present code. May be repeated.",
)
@options.as_json
@click.pass_context
def prove(
    context: click.Context,
    target: str | None,
    op_name: str | None,
    kernel_name: str | None,
    out: Path | None,
    workers: int,
    renew: Path | None,
    files: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Run every kernel that can run on a device of this machine on all of its examples, and write a report.

    \b
    kernelbench prove --target gfx1100             writes proof_gfx1100.json
    kernelbench prove --renew proof_gfx1100.json   runs the kernels whose code has changed since
    kernelbench prove --check proof_gfx1100.json   what the report proves of the present code

    Kernels are verified as by kernelbench verify. The report has the device, driver and versions, and per kernel and example the
    hash of the code that ran, the error and the tolerance. It counts as the grade "elsewhere" for a kernel as long as its code
    has that hash, and a failure counts against the kernel. Exit status 1 if any kernel is wrong; the report is written anyway, also
    after Ctrl-C, with what ran until then. With --renew the report has the rows of FILE that prove a kernel's present code, and what
    FILE says of its own run. With --check: 1 if no report counts for or against any kernel.
    """
    if files:
        if any(given is not None for given in (target, op_name, kernel_name, out, renew)):
            raise click.UsageError(
                "--check runs nothing: give it without --target, --op, --kernel, --out and --renew"
            )
        _check(context, files, as_json)
        return
    from gristmill.bench import proofs

    here, runs, refused = examples(target, op_name, kernel_name)
    for example in [example for example in runs if proofs.interprets(example.kernel, here.target)]:
        refused[example.kernel.name] = "on a CPU Triton only interprets"
        runs.remove(example)
    old = None if renew is None else _of_such_a_device(renew, here)
    kept = () if old is None else proofs.proving(old, default_registry())
    known = {one["kernel"] for one in kept}
    if old is not None and runs and all(example.kernel.name in known for example in runs):
        if as_json:
            console.emit(old)
        else:
            console.out().print(f"{renew} proves all of it: nothing has run")
        return
    runs = [example for example in runs if example.kernel.name not in known]
    if not runs:
        raise click.UsageError(
            f"nothing to prove on {here.target.name}: see kernelbench list --target {here.target.name}"
        )
    path = out or Path(f"proof_{here.target.name.replace(':', '_')}.json")
    if why := unwritable(path):
        raise click.UsageError(why)
    outcomes, done = _outcomes(runs, here.device or "cpu", workers), []
    try:
        for example in console.progress(runs, str, quiet=as_json):
            done.append(proofs.row(example, next(outcomes)))
    finally:  # also after an interrupt: the kernels whose examples all ran are proven
        content = proofs.report(here, [*kept, *done], refused, old)
        if done:
            proofs.write(path, content)
    if as_json:
        console.emit(content)
    else:
        _print(content)
        console.out().print(f"{path}: {len(done)} examples of {len({r['kernel'] for r in done})} kernels")
    if any(one["ok"] is False for one in done):
        context.exit(1)


def _of_such_a_device(path: Path, here: Place) -> dict[str, Any]:
    """The report of `path`. ResultError: it is none. UsageError: it is of another device."""
    from gristmill.bench import proofs

    data = proofs.read(path)
    at = data["environment"]
    if (at["target"], at.get("device")) != (here.target.name, here.target.device):
        raise click.UsageError(
            f"--renew {path}: it is of {at['target']}, {at.get('device')}; this is {here.target.name}, {here.target.device}"
        )
    return data


def _outcomes(runs: list[Example], device: str, workers: int) -> Any:
    """The outcomes, in the order of the examples. Those of one kernel run in one child, which compiles it once."""
    from gristmill.autotune.worker import Worker

    pool = [Worker() for _ in range(workers)]
    idle: SimpleQueue[Worker] = SimpleQueue()
    for worker in pool:
        idle.put(worker)

    def verify(group: list[Example]) -> list[dict[str, Any]]:
        worker = idle.get()
        try:
            return [example.verify(worker, device) for example in group]
        finally:
            idle.put(worker)

    groups: dict[str, list[Example]] = {}
    for example in runs:
        groups.setdefault(example.kernel.name, []).append(example)
    threads = ThreadPoolExecutor(workers)
    futures: list[Future[list[dict[str, Any]]]] = [threads.submit(verify, group) for group in groups.values()]
    try:
        for future in futures:
            yield from future.result()
    finally:  # also after an interrupt: start nothing more, and do not wait for the children
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in pool:
            worker.close()


def _print(content: dict[str, Any]) -> None:
    of: dict[str, list[dict[str, Any]]] = {}
    for one in content["rows"]:
        of.setdefault(one["kernel"], []).append(one)
    environment = content["environment"]
    console.table(
        f"Proof on {environment['target']}: {environment['device'] or 'device without a name'}",
        ["kernel", "examples", "", "reason"],
        [
            [
                name,
                str(len(rows)),
                "WRONG"
                if any(r["ok"] is False for r in rows)
                else "?"
                if any(r["ok"] is None for r in rows)
                else "ok",
                next(
                    (
                        f"{r['problem']}: {r['reason']}"
                        for r in sorted(rows, key=lambda r: r["ok"] is None)
                        if not r["ok"]
                    ),
                    "",
                ),
            ]
            for name, rows in of.items()
        ],
        right=("examples",),
    )


def _check(context: click.Context, files: tuple[Path, ...], as_json: bool) -> None:
    from gristmill.bench import proofs

    rows = []
    for path in files:
        data = proofs.read(path)
        environment = data["environment"]
        rows += [
            {
                "file": str(path),
                "target": environment["target"],
                "device": environment.get("device") or None,
                "kernel": name,
                "state": finding.state,
                "reason": finding.reason,
            }
            for name, finding in proofs.judged(data, default_registry()).items()
        ]
    if as_json:
        console.emit(rows)
    else:
        console.table(
            "Proof reports, with the present code",
            ["file", "target", "kernel", "", "reason"],
            [[r["file"], r["target"], r["kernel"], r["state"], r["reason"]] for r in rows],
        )
    if not any(r["state"] in COUNTING for r in rows):
        context.exit(1)
