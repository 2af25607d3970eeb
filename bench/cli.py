"""The kernelbench command line: see, explain, verify and measure kernels."""

from __future__ import annotations

import click

from gristmill import __version__, console
from gristmill.bench.commands.bench import bench
from gristmill.bench.commands.bisect import bisect
from gristmill.bench.commands.check import check
from gristmill.bench.commands.compare import compare
from gristmill.bench.commands.decode import decode
from gristmill.bench.commands.doctor import doctor
from gristmill.bench.commands.explain import explain
from gristmill.bench.commands.list import list_kernels
from gristmill.bench.commands.noise import noise
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
    """See which LLM kernels exist, which one would run here and why, whether they are right, and how fast they are.

    \b
    kernelbench doctor                          what this machine has
    kernelbench list --op linear                every kernel of an operation, and what the others lack
    kernelbench explain linear --axes           how problems of an operation are written
    kernelbench explain linear --problem "m=16,n=4096,k=4096,x=bf16,w=int4_g128"
    kernelbench verify --op rms_norm            run kernels against the reference
    kernelbench bench rms_norm                  time them, next to the measured floor
    kernelbench compare rms_norm                who is faster, said only where the samples allow it
    kernelbench check baseline.json             for CI: has anything become slower or wrong?
    kernelbench noise                           what this machine takes a kernel and itself to differ by
    kernelbench tune --model llama-3-8b         find the fastest of everything a model calls, in ten minutes
    kernelbench regret --suite linear_regret     what selection loses to the best of all candidates
    kernelbench shapes --model llama-3-8b       every problem that a model calls
    kernelbench coverage --model llama-3-8b     how well the store knows them
    kernelbench decode --quant int4_g128        milliseconds per token of a whole model, and where they go
    kernelbench rerun results.json              every row again, here, and where it differs; repro, history
    kernelbench bisect --good v0.1 -- kernelbench check base.json      the commit since which it is slower
    kernelbench report results.json --html p    one page, no network: rooflines, winners, history
    kernelbench store lint                      what selection knows: merge, diff, lint, why

    GRISTMILL_POLICY names a policy file (TOML): pins, exclude, strict, deterministic, batch_invariant, weight_memory,
    cpu_level, store, cache. Every command takes --json: JSON alone on stdout, unknown values null.
    """


for _command in (
    doctor,
    list_kernels,
    explain,
    verify,
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
    bisect,
):
    cli.add_command(_command)


def main() -> None:
    """Entry point of the console script."""
    console.run(cli, "kernelbench")


if __name__ == "__main__":
    main()
