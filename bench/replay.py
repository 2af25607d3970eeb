"""Regret of present selection, evaluated with the times in a result file of `kernelbench regret`.

A change of a cost model, a default or a rule of selection is thus judged without the device. Kernels that no longer exist are
left out. Picks that were not candidates when the file was written have no regret, and are counted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gristmill.autotune.options import Job
from gristmill.autotune.place import Place, place
from gristmill.bench.regret import ROUNDS, Studied, ask, unfolded
from gristmill.bench.result_file import ResultError
from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, config_key, target_key
from gristmill.kernel_registry.targets.devices import by_device_name


def replay(data: dict[str, Any], store: Store | None = None) -> tuple[Place, list[Studied]]:
    """The problems of a result file, evaluated with `store` (None: the one in use, with shipped times) and with stores made
    from the times of the file.

    ResultError for a file that `kernelbench regret` did not write.
    """
    if "regret" not in data:
        raise ResultError("expected a result file of kernelbench regret: it has no regret")
    here = _place(data["environment"])
    store = Store.read_over_shipped(here.policy.store_path) if store is None else store
    studied = [_studied(row, here, store) for row in data["rows"] if row.get("us")]
    ask(studied, here, store, [])
    return here, studied


def _place(environment: dict[str, Any]) -> Place:
    """The device of a file, and this installation with the toolchain of the file."""
    known = by_device_name(str(environment.get("device") or ""))
    there = place(known.alias if known else environment["target"])
    keyed = dict(part.partition("=")[::2] for part in str(environment.get("toolchain") or "").split(","))
    packages: dict[str, str] = {name: str(keyed[name]) for name in ("torch", "triton") if name in keyed}
    build = replace(
        there.build,
        packages=Build.of({**dict(there.build.packages), **packages}).packages,
        python=str(environment.get("python") or ""),
        library=keyed.get("lib", ""),
        driver=keyed.get("driver", ""),
    )
    return replace(
        there, build=build, target=replace(there.target, device=str(environment.get("device") or ""))
    )


def _studied(row: dict[str, Any], here: Place, store: Store) -> Studied:
    op = default_registry().op(row["op"])
    job = Job(op, op.problem(row["problem"]))
    kernels = {k.name: k for k in default_registry().kernels_of(op.name)}
    one = Studied(
        job,
        exact=any(t.problem == str(job.problem) for t in store.times(op.name, target_key(here.target))),
        missing=int(row["missing"]),
    )
    for kernel, table in row.get("times", {}).items():
        for config, us in unfolded(table).items():
            one.times[kernel, config] = us if isinstance(us, list) else [us] * ROUNDS
    one.times = {key: us for key, us in one.times.items() if key[0] in kernels}
    for kernel, config in one.times:
        one.configs[kernel, config] = dict(part.partition("=")[::2] for part in config.split(",") if part)
    tried = sorted({kernel for kernel, _ in one.times})
    defaults = {(name, config_key(kernels[name].config(job.problem, here.target))) for name in tried}
    one.defaults = defaults & one.times.keys()
    one.best = min(one.times, key=one.judged_us, default=None)
    return one
