"""The kernelbench command line: list, explain, verify and benchmark kernels."""

from __future__ import annotations

import click

from gristmill import __version__, console
from gristmill.bench.commands.bench import bench
from gristmill.bench.commands.check import check
from gristmill.bench.commands.compare import compare
from gristmill.bench.commands.decode import decode
from gristmill.bench.commands.doctor import doctor
from gristmill.bench.commands.explain import explain
from gristmill.bench.commands.list import list_kernels
from gristmill.bench.commands.noise import noise
from gristmill.bench.commands.prove import prove
from gristmill.bench.commands.regret import regret
from gristmill.bench.commands.report import report
from gristmill.bench.commands.results import history, repro, rerun
from gristmill.bench.commands.shapes import coverage, shapes
from gristmill.bench.commands.store import store
from gristmill.bench.commands.tune import tune
from gristmill.bench.commands.verify import verify


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kernelbench")
def cli() -> None:
    """List LLM kernels, explain which one runs here, verify them against the reference, and benchmark them.

    \b
    kernelbench doctor                          what this machine has
    kernelbench list --op linear                every kernel of an operation, and what missing ones need
    kernelbench explain linear --axes           the axes of an operation's problems
    kernelbench explain linear --problem "m=16,n=4096,k=4096,x=bf16,w=int4_g128"
    kernelbench verify --op rms_norm            run kernels against the reference
    kernelbench prove --target gfx1100          a report of what matches there, as evidence for others
    kernelbench bench rms_norm                  time kernels, next to the measured floor
    kernelbench compare rms_norm                which kernel is faster, if the samples are conclusive
    kernelbench check baseline.json             for CI: has anything become slower or wrong?
    kernelbench noise                           the measured difference of a kernel from itself
    kernelbench tune --model llama-3-8b         find the fastest kernels for a model, in ten minutes
    kernelbench regret --suite linear_regret     what selection loses to the fastest candidates
    kernelbench shapes --model llama-3-8b       every problem that a model calls
    kernelbench coverage --model llama-3-8b     which of them the store has times for
    kernelbench decode --quant int4_g128        milliseconds per token of a whole model, by part
    kernelbench rerun results.json              repeat every row and report differences; repro, history
    kernelbench report results.json --html p    one HTML page: rooflines, fastest kernels, history
    kernelbench store lint                      the records of selection: merge, diff, lint, why

    GRISTMILL_POLICY names a policy file (TOML): pins, exclude, strict, deterministic, batch_invariant, weight_memory,
    cpu_level, store, cache. Every command takes --json: only JSON on stdout, unknown values null.
    """


for _command in (
    doctor,
    list_kernels,
    explain,
    verify,
    prove,
    bench,
    compare,
    check,
    noise,
    store,
    shapes,
    coverage,
    tune,
    decode,
    regret,
    rerun,
    repro,
    history,
    report,
):
    cli.add_command(_command)


def main() -> None:
    """Entry point of the console script."""
    console.run(cli, "kernelbench")


if __name__ == "__main__":
    main()
