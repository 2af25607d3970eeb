"""kernelbench store: inspect and maintain the records that selection reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gristmill import console
from gristmill.autotune.place import place
from gristmill.bench import options
from gristmill.bench.out_file import OutFile
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, Timing, config_key, target_key

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.group()
def store() -> None:
    """Inspect and maintain stores of verifications and measured times, which selection reads.

    A store is JSON with one record per line. The one in use is named by `kernelbench doctor`.

    \b
    kernelbench store why linear "m=1,n=4096,k=4096,w=int4_g128"    which record decides, and by which rule
    kernelbench store lint                                          records without effect
    kernelbench store revalidate                                    are another toolchain's times still valid?
    kernelbench store merge --into all.json a.json b.json
    kernelbench store ship autotune/tuned/h200_verified.json        verifications for other devices of this model
    kernelbench store diff a.json b.json
    """


def _existing(path: Path) -> Store:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected a store")
    return Store.read(path)


@store.command()
@click.argument("files", nargs=-1, required=True, type=_FILE, metavar="FILE...")
@click.option(
    "--into",
    required=True,
    type=OutFile(),
    metavar="FILE",
    help="The store to write; its own records are merged too.",
)
@options.as_json
def merge(files: tuple[Path, ...], into: Path, as_json: bool) -> None:
    """Merge stores into one. Of two records with the same key, a failed verification wins, and the time with more samples.

    Safe while others write to the same store: nothing is lost.
    """
    from gristmill.autotune import store as writing
    from gristmill.autotune.store_tools import merge as merged
    from gristmill.autotune.store_tools import records

    parts = [_existing(path) for path in files]
    result = writing.update(into, lambda present: merged([present, *parts]))
    answer = {
        "into": str(into),
        "records": len(records(result)),
        "verifications": len(result.verifications),
        "timings": len(result.timings),
    }
    if as_json:
        console.emit(answer)
    else:
        console.out().print(f"{into}: {answer['verifications']} verifications, {answer['timings']} times")


@store.command()
@click.argument("out", type=OutFile(), metavar="OUT")
@options.target
@options.as_json
def ship(out: Path, target: str | None, as_json: bool) -> None:
    """Write the verifications of this device by the present code to OUT, to come with gristmill: a file under autotune/tuned.

    Other devices of the same model then run these kernels after one verification for each configuration. The code is that of the libraries
    that are loaded, compiler and flags included: ship it with the wheel that has them. Fill the store first: gristmill warm, kernelbench verify.
    """
    from gristmill.autotune.store import dump
    from gristmill.autotune.store_tools import of_present_code

    here = place(target)
    own, registry = target_key(here.target), default_registry()
    shipped = Store()
    for record in _existing(here.policy.store_path).verifications.values():
        if (
            record.ok
            and (record.target, record.toolchain) == (own, here.build.key())
            and of_present_code(registry, record)
        ):
            shipped.add(record)
    out.write_text(dump(shipped), encoding="utf-8")
    answer = {"out": str(out), "device": own, "verifications": len(shipped.verifications)}
    if as_json:
        console.emit(answer)
    else:
        console.out().print(f"{out}: {answer['verifications']} verifications on {own}")


@store.command()
@click.argument("before", type=_FILE, metavar="A")
@click.argument("after", type=_FILE, metavar="B")
@options.as_json
@click.pass_context
def diff(context: click.Context, before: Path, after: Path, as_json: bool) -> None:
    """How store B differs from store A: records added, removed, and changed (another time, another outcome).

    \b
    kernelbench store diff before.json after.json

    Exit status 1 if they differ.
    """
    from gristmill.autotune.store_tools import diff as differences

    rows = []
    for one in differences(_existing(before), _existing(after)):
        record: Any = one.after or one.before
        rows.append(_row(record) | {"change": one.kind, "what": one.what})
    _show(rows, f"{before} to {after}", ("change", "op", "kernel", "problem", "target", "what"), as_json)
    if rows:
        context.exit(1)


@store.command()
@click.argument("file", type=_FILE, metavar="[FILE]", required=False)
@options.target
@options.as_json
@click.pass_context
def lint(context: click.Context, file: Path | None, target: str | None, as_json: bool) -> None:
    """List the records of FILE (default: the store in use) that have no effect or do harm.

    \b
    never     it is never looked up: the operation, kernel or problem no longer exists, or its form has changed
    stale     made with other code or another toolchain: a time counts as near only, a verification not at all
    slower    a tuned configuration that is slower than the default one
    failed    a kernel that did not match the reference here, and is excluded

    Exit status 1 if there are any but failed ones.
    """
    from gristmill.autotune.store_tools import lint as findings

    here = place(target)
    path = file or here.policy.store_path
    held = _existing(path) if file else Store.read(path)
    reported = findings(held, default_registry(), here.target, target_key(here.target), here.build)
    rows = [_row(one.record) | {"finding": one.kind, "reason": one.reason} for one in reported]
    _show(rows, f"Lint of {path}", ("finding", "op", "kernel", "problem", "target", "reason"), as_json)
    if any(one.kind != "failed" for one in reported):
        context.exit(1)


@store.command()
@click.option(
    "--sample",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Number of records per kernel to measure again.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed of the sample.")
@click.option("--dry-run", is_flag=True, help="Measure, and write nothing.")
@options.target
@options.as_json
@click.pass_context
def revalidate(
    context: click.Context, sample: int, seed: int, dry_run: bool, target: str | None, as_json: bool
) -> None:
    """After a change of toolchain: verify and time a sample of another toolchain's times, including shipped ones.

    \b
    holds     within 10 % of the stored time: the kernel's other times are carried over to this toolchain
    differs   faster or slower: the others remain near times; kernelbench tune --redo measures them
    wrong     a wrong result: recorded as failed, which excludes that configuration; the others remain near times

    Exit status 1 if a result is wrong.
    """
    from gristmill.autotune import store as writing
    from gristmill.bench import revalidate as again
    from gristmill.bench.problems import here_or_refuse

    here = place(target)
    here_or_refuse(here)
    path = here.policy.store_path
    stale = again.groups(Store.read_over_shipped(path), here)
    with console.status(quiet=as_json) as progress:
        records = again.revalidate(stale, here, sample=sample, seed=seed, progress=progress)
    if records and not dry_run:
        writing.update(path, lambda present: again.replaced(present, records))
    rows = [group.as_dict() for group in stale]
    if as_json:
        console.emit(
            {
                "store": str(path),
                "toolchain": here.build.key(),
                "written": 0 if dry_run else len(records),
                "kernels": rows,
            }
        )
    elif not rows:
        console.out().print(f"{path}: no time of this device is another toolchain's")
    else:
        columns: dict[str, console.Cell] = {"operation": "op", "kernel": "kernel", "outcome": "outcome"}
        columns |= {"records": "records", "sampled": "sampled"}
        columns |= {"now / then": "ratio", "least": "least", "most": "most"}
        columns |= {"reason": lambda r: "; ".join(r["reasons"])}
        right = ("records", "sampled", "now / then", "least", "most")
        console.table_of(f"Times of another toolchain than {here.build.key()}", rows, columns, right)
    if any(group.outcome == again.WRONG for group in stale):
        context.exit(1)


@store.command()
@click.argument("op_name", metavar="OP")
@click.argument("problem_text", metavar="PROBLEM")
@options.described_target
@options.as_json
def why(op_name: str, problem_text: str, target: str | None, as_json: bool) -> None:
    """Print the kernel that a problem gets, the record that decides it (of the store in use or of the shipped times), and the
    rule. Verifies and times nothing.

    \b
    measured   a time of this problem, with the present code and toolchain
    near       a time of a problem within a factor of two, or of other code; scaled by the device's ceilings
    sibling    a time of another device of the same target
    model      the kernel's cost model        priority   no record: the declared order
    """
    from gristmill.kernel_registry.select import select
    from gristmill.kernel_registry.times import Times

    registry, here = default_registry(), place(target)
    op = registry.op(op_name)
    problem = op.problem(problem_text)
    if problem.open_axes:
        raise click.UsageError(
            f"problem {problem} leaves {', '.join(problem.open_axes)} open; give every axis a value"
        )
    held = Store.read_over_shipped(here.policy.store_path)
    selection = select(
        op,
        problem,
        registry.kernels_of(op.name),
        here.target,
        here.build,
        held,
        here.policy,
        foreign=here.device is None,
    )
    times = Times(op, problem, here.target, here.build, held)
    rows: list[dict[str, Any]] = []
    for candidate in selection.candidates:
        if candidate.verdict not in ("selected", "eligible", "unverified"):
            continue
        evidence = times.evidence(candidate.kernel)
        record, far, _ = evidence[0] if evidence else (None, None, None)
        rows.append(
            {
                "kernel": candidate.kernel.name,
                "verdict": candidate.verdict,
                "rule": candidate.source,
                "expected_us": candidate.expected_us,
                "config": dict(candidate.config or {}),
                "record": None if record is None else _row(record),
                "distance": far,
                "records": len(evidence),
            }
        )
    if as_json:
        console.emit(
            {"op": op.name, "problem": str(problem), "store": str(here.policy.store_path), "candidates": rows}
        )
        return
    columns: dict[str, console.Cell] = {"kernel": "kernel", "verdict": "verdict", "rule": "rule"}
    columns |= {"expected µs": "expected_us", "decided by": lambda r: _decided(r["record"])}
    columns |= {"distance": lambda r: "" if r["distance"] is None else f"{r['distance']:.2f}"}
    columns |= {"configuration": lambda r: config_key(r["config"])}
    title = f"{op.name} {problem} by {here.policy.store_path}"
    console.table_of(title, rows, columns, right=("expected µs", "distance"))


def _decided(record: dict[str, Any] | None) -> str:
    if record is None:
        return "no record"
    return f"{record['problem']} on {record['target']}: {console.number(record['us'])} µs"


def _row(record: Any) -> dict[str, Any]:
    timing = isinstance(record, Timing)
    return {
        "kind": "timing" if timing else "verification",
        "op": record.op,
        "kernel": record.kernel,
        "problem": record.problem,
        "target": record.target,
        "toolchain": record.toolchain,
        "config": config_key(record.config) if timing else record.config,
        "us": record.us if timing else None,
        "ok": None if timing else record.ok,
    }


def _show(rows: list[dict[str, Any]], title: str, columns: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        console.emit(rows)
    elif not rows:
        console.out().print(f"{title}: nothing")
    else:
        console.table(title, columns, [[row[name] for name in columns] for row in rows])
