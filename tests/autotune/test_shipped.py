"""Times and tuned configurations that ship with gristmill: each refers to an existing kernel, problem and
instance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.autotune.store import save
from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.plan import make_plan
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.select import Selection, select
from gristmill.kernel_registry.store import SHIPPED, Store, Timing, shipped_times
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.frag16_sm90.instances import schedule

OP = default_registry().op("linear")
SCHEDULES = {
    f"linear_w{bits}a16_{name}_sm90": name for name in ("decode", "decode_ws", "gemm_ws") for bits in (4, 8)
}
DECODE = tuple(name for name, schedule_name in SCHEDULES.items() if schedule_name != "gemm_ws")
GEMM = tuple(name for name, schedule_name in SCHEDULES.items() if schedule_name == "gemm_ws")
BUILD = Build.of({"torch": "2.13.0", "triton": "3.9.0"}, cuda_archs=("sm_90a",), triton_backends=("cuda",))


def chosen(text: str, target: str, store: Store, build: Build = BUILD) -> Selection:
    return select(
        OP,
        OP.problem(text),
        default_registry().kernels_of("linear"),
        Target.parse(target),
        build,
        store,
        Policy(),
        foreign=True,
    )


def faults(timing: Timing) -> list[str]:
    """Returns what is wrong with a shipped record."""
    errors = []
    registry = default_registry()
    names = {kernel.name for kernel in registry.kernels_of(timing.op)}
    problem = registry.op(timing.op).problem(timing.problem)
    if timing.kernel not in names:
        return [f"no kernel {timing.kernel}"]
    kernel = registry.kernel(timing.op, timing.kernel)
    if kernel.accepts(problem) is not None:
        errors.append(f"{timing.kernel} does not take {problem}")
    target = Target.parse("h200")
    tried = () if kernel.space is None else kernel.space(problem, target)
    space = (kernel.config(problem, target), *tried)
    if set(timing.config) not in [set(config) for config in space]:
        errors.append(f"{timing.kernel} has no configuration such as {dict(timing.config)}")
    if timing.kernel in SCHEDULES:
        schedules = schedule(SCHEDULES[timing.kernel])
        form = schedules.format_of(QuantScheme.parse(problem.text("w")))
        if form is None:
            return [*errors, f"not a format of {schedules.name}: {problem}"]
        key = tuple(timing.config.get(name) for name in schedules.key)
        if key not in [tuple(shape[name] for name in schedules.key) for shape in schedules.shapes_of(form)]:
            errors.append(f"no instance {key} of {form.name}")
        if (timing.config.get("format"), timing.config.get("tile_bytes")) != (form.name, form.tile_bytes):
            errors.append(f"not the format of {problem}")
    if timing.code or not timing.us > 0 or "|" not in timing.target:
        errors.append("a shipped record has no code hash, a time, and a product name")
    return errors


def test_every_record_speaks_of_something() -> None:
    assert sorted(SHIPPED.glob("*.json")), "nothing is shipped"
    assert len(shipped_times()) > 100
    wrong = [(timing.kernel, timing.problem, what) for timing in shipped_times() for what in faults(timing)]
    assert not wrong, wrong[:5]


def test_a_wrong_record_would_show() -> None:
    good = next(t for t in shipped_times() if t.kernel == "linear_w4a16_decode_sm90")
    assert not faults(good)
    assert faults(replace(good, kernel="linear_w9a16_sm90"))
    assert faults(replace(good, config={**good.config, "rt": 3}))
    assert faults(replace(good, config={k: v for k, v in good.config.items() if k != "split"}))
    assert faults(replace(good, code="abc"))


@pytest.mark.parametrize("scheme", ["int4_g128", "nvfp4", "mxfp4", "fp8_block", "int4_g32"])
def test_a_table_problem_is_selected_by_measured_time(scheme: str) -> None:
    store = Store.read_over_shipped(Path("/nonexistent/store.json"))
    for target, source in (("h200", ("measured", "near")), ("sm_90a", ("sibling",))):
        best = chosen(f"m=1,n=28672,k=4096,w={scheme}", target, store).best
        assert best is not None and best.kernel.name in DECODE and best.source in source, (target, best)
        record = min(
            (
                t
                for t in shipped_times()
                if t.problem == str(OP.problem(f"m=1,n=28672,k=4096,w={scheme}"))
                and t.kernel == best.kernel.name
            ),
            key=lambda t: t.us,
        )
        assert dict(best.config or {}) == dict(record.config)


def test_shipped_times_stay_measured_when_code_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of instances that is edited changes the hash of every kernel that reads it, and no shipped time."""
    text = "m=1,n=28672,k=4096,w=int4_g128"
    record = min((t for t in shipped_times() if t.problem == str(OP.problem(text))), key=lambda t: t.us)
    packages = dict(part.split("=") for part in record.toolchain.split(","))
    same = Build.of(
        {name: packages[name] for name in ("torch", "triton")},
        cuda_archs=("sm_90a",),
        triton_backends=("cuda",),
        python=packages["py"],
        library=packages["lib"],
        driver=packages["driver"],
    )
    assert same.key() == record.toolchain
    monkeypatch.setattr(Kernel, "code_hash", lambda *given, **more: "of edited sources")
    for code, source in (("", "measured"), ("of yesterday", "near")):
        store = Store()
        store.add(replace(record, code=code))
        best = chosen(text, "h200", store, same).best
        assert best is not None and (best.kernel.name, best.source) == (record.kernel, source)


@pytest.mark.parametrize("scheme", ["int4_g128", "int4_g32_zp", "nvfp4", "mxfp4", "int8_ch", "fp8_block"])
def test_a_plan_keeps_one_packing_for_every_size(scheme: str) -> None:
    store, target = Store.read_over_shipped(Path("/nonexistent/store.json")), Target.parse("h200")
    kernels = default_registry().kernels_of("linear")
    static = OP.static(OP.problem(f"n=28672,k=4096,w={scheme}"))
    plan = make_plan(
        OP,
        static,
        default_registry().layouts,
        Policy(),
        lambda problem, layouts: select(
            OP, problem, kernels, target, BUILD, store, Policy(), layouts=layouts, foreign=True
        ),
    )
    assert len(plan.layouts) == 1 and plan.layouts[0].endswith("_frag16_v1")
    for entry in plan.entries:
        # At M = 16 the kernels for many rows are faster for some formats.
        if entry.m_max is not None and entry.m_max <= 256:
            allowed = DECODE if entry.m_max <= 8 else DECODE + GEMM
            assert entry.kernel in allowed and entry.source in ("measured", "near"), entry


def test_what_a_user_measured_replaces_what_was_shipped(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    shipped = next(t for t in shipped_times() if t.kernel == "linear_w4a16_decode_sm90")
    save(path, [replace(shipped, us=0.125)])
    merged = Store.read_over_shipped(path)
    same = [t for t in merged.timings if t.key == shipped.key]
    assert [t.us for t in same] == [0.125]
    assert len(merged.timings) == len(shipped_times())
    assert len(Store.read(path).timings) == 1, "what is shipped is never written to the user's store"
    elsewhere = Store.read_over_shipped(tmp_path / "none.json")
    assert shipped in elsewhere.times(shipped.op, shipped.target), (
        "a store over what is shipped changes no other"
    )
