"""gristmill warm: kernels that are selected, verified and compiled ahead of time."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from gristmill import console
from gristmill.tools.model_command import ModelCommand, load_llm, model_option


@click.command(cls=ModelCommand)
@model_option
@click.option("--json", "as_json", is_flag=True, help="Only JSON on stdout.")
def warm(as_json: bool, **options: Any) -> None:
    """Select, verify and compile ahead of time every kernel that a model calls, so that later processes start from the store.

    For the image of a container, or after an update. This is what every engine does when it is loaded; --warm is ignored. The store of the
    policy keeps the records, and Triton's cache the compiled code: with an entry "cache" in the policy both are in that folder, which a
    container image takes along, under the same path.

    With --json: "seconds" by phase ("weights", "selection", "verification", "compilation", "graphs"), "graphs" (captured), "graph_bytes",
    "kernels" (plan entries resolved), "verified" (what had no record before), "ran" (whether steps ran, as on a GPU), "compiled" and "reused"
    (kernels of Triton, in this process), "store" (its path).
    """
    options["warm"] = "auto"
    from gristmill.kernel_registry.policy import Policy

    policy = Policy.load(options["policy"]) if options["policy"] else Policy.current()
    report = load_llm(options, as_json).engine.warmed
    assert report is not None
    if as_json:
        console.emit(asdict(report) | {"store": str(policy.store_path)})
        return
    rows = [[phase, f"{seconds:.1f}"] for phase, seconds in report.seconds.items()]
    console.table("Warm-up", ["phase", "seconds"], rows, right=("seconds",))
    console.err().print(f"records in {policy.store_path}")
