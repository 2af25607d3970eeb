"""kernelbench noise: the measured difference of a kernel from itself on this machine."""

from __future__ import annotations

import click

from gristmill import console
from gristmill.autotune.place import imported, place
from gristmill.bench import options
from gristmill.bench.problems import concrete, here_or_refuse
from gristmill.kernel_registry.registry import default_registry

TOO_NOISY = 3
"""Exit status, as `kernelbench check` has it."""


@click.command()
@click.argument("op_name", metavar="[OP]", default="rms_norm")
@click.option("--problem", "text", metavar="P", help="A problem of OP. Default: its first benchmark problem.")
@click.option(
    "--kernel",
    "name",
    metavar="K",
    help="The kernel that is compared with itself. Default: the one that selection would run.",
)
@click.option(
    "--comparisons",
    type=click.IntRange(1, 10_000),
    default=20,
    show_default=True,
    metavar="N",
    help="Number of comparisons.",
)
@options.min_effect(0.03, "The smallest relative change to detect.")
@options.hot
@options.target
@options.as_json
@click.pass_context
def noise(
    context: click.Context,
    op_name: str,
    text: str | None,
    name: str | None,
    comparisons: int,
    min_effect: float,
    hot: bool,
    target: str | None,
    as_json: bool,
) -> None:
    """Compare a kernel of OP with itself, repeatedly: what this machine measures where there is no difference.

    \b
    kernelbench noise rms_norm --problem m=64,n=4096 --min-effect 0.02

    \b
    floor       the 95 % quantile of the measured differences: smaller changes cannot be detected
    worst       the largest measured difference
    false       comparisons that said FASTER or SLOWER       undecided   those that said UNCLEAR

    Exit status 0; 3 if the minimum effect is below the floor.
    """
    from gristmill.autotune.candidate import Candidate, shared_rotations
    from gristmill.autotune.resolve import Resolver
    from gristmill.bench.compare import verified
    from gristmill.bench.statistics.noise import NoiseError, self_test
    from gristmill.bench.statistics.verdict import Rule

    here = place(target)
    device, op = here_or_refuse(here), default_registry().op(op_name)
    problem = concrete(op, [op.bench[0] if text is None else text])[0]
    if name is None:
        kernel = Resolver(device, here.policy).resolve(op, problem).require().kernel
    else:
        kernel = default_registry().kernel(op.name, name)
        here = imported(here, [kernel])
    config = kernel.config(problem, here.target) if not (gap := here.why_not(kernel, problem)) else {}
    if gap or (gap := verified(op, kernel, config, problem, device)):
        raise click.UsageError(f"{kernel.name} cannot be timed on {problem}: {gap}")
    shared = shared_rotations(op, problem, device, [kernel], hot=hot)[kernel.name]
    with console.status(quiet=as_json) as progress:
        progress(f"{kernel.name} {problem}: {comparisons} comparisons with itself")
        measured = self_test(
            lambda side: Candidate(kernel, config, shared, name=side),
            Rule(min_effect=min_effect),
            comparisons=comparisons,
        )
    try:
        measured.refuse(min_effect)
        refused = ""
    except NoiseError as error:
        refused = str(error)
    if as_json:
        console.emit(
            {
                "op": op.name,
                "problem": str(problem),
                "kernel": kernel.name,
                **vars(measured),
                "min_effect": min_effect,
                "refused": refused,
            }
        )
    else:
        console.table(
            f"{kernel.name} and itself on {here.target.name} {here.target.device}",
            ["what", "found"],
            [
                ["problem", f"{op.name} {problem}"],
                ["comparisons", measured.comparisons],
                ["floor", f"{measured.floor:.2%}"],
                ["worst", f"{measured.worst:.2%}"],
                ["false", measured.false],
                ["undecided", measured.undecided],
            ],
        )
        console.out().print(f"\n{refused or f'A minimum effect of {min_effect:.1%} can be detected here.'}")
    if refused:
        context.exit(TOO_NOISY)
