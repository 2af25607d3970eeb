"""Of the configurations that were measured near a problem, the one that suits its own sizes runs."""

from __future__ import annotations

import dataclasses

from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, Timing, target_key
from gristmill.kernel_registry.target import Target
from gristmill.kernel_registry.times import Times
from gristmill.kernels.linear.frag16_sm90 import gemm_ws
from gristmill.kernels.linear.frag16_sm90.instances import formats

TARGET, BUILD = Target.parse("h200"), Build()
REGISTRY = default_registry()
OP, KERNEL = REGISTRY.op("linear"), REGISTRY.kernel("linear", "linear_w4a16_gemm_ws_sm90")
FORM = formats()["int4_g128"]


def rows(m: int) -> Problem:
    return OP.problem(f"m={m},n=6144,k=4096,w=int4_g128")


def config(m: int, mt: int, slices: int) -> Config:
    """The model's best configuration of a shape of CTA for `m` rows."""
    shape = next(s for s in gemm_ws.shapes_of(FORM) if (s.mt, s.slices) == (mt, slices) and s.c * slices == 2)
    found = [
        (gemm_ws.microseconds(FORM, s, p, m, 6144, 4096, 132), gemm_ws.config_of(FORM, s, p, m, 6144, 4096))
        for s, p in gemm_ws.candidates(FORM, m, 6144, 4096, 132)
        if s == shape
    ]
    best = min(found, key=lambda pair: pair[0])[1]
    return {"format": FORM.name, "tile_bytes": FORM.tile_bytes, **best}


def times(m: int, *records: tuple[int, Config, float]) -> Times:
    store = Store()
    for at, tuned, us in records:
        store.add(
            Timing(
                op="linear",
                kernel=KERNEL.name,
                code="",
                problem=str(rows(at)),
                config=dict(tuned),
                target=target_key(TARGET),
                toolchain=BUILD.key(),
                us=us,
                timing="",
            )
        )
    return Times(OP, rows(m), TARGET, BUILD, store)


NARROW, TALL = config(128, 128, 2), config(192, 192, 2)
"""One tile of 128 rows for each CTA, and of 192: beyond 128 rows the first takes two, in two rounds."""
RECORDS = (128, NARROW, 13.0), (192, TALL, 21.0)


def test_tiles_of_a_smaller_problem_do_not_serve_one_row_more() -> None:
    chosen = times(130, *RECORDS).config(KERNEL)
    assert chosen is not None and int(chosen["mt"]) >= 130
    assert times(120, *RECORDS).config(KERNEL) == NARROW


def test_a_record_of_the_very_problem_decides_whatever_the_model_says() -> None:
    assert times(130, *RECORDS, (130, NARROW, 40.0)).config(KERNEL) == NARROW


def test_the_default_configuration_runs_where_those_of_near_problems_suit_less() -> None:
    """Both records have tiles that 256 rows fill badly; the default one's are scaled by what the records took beside the model."""
    chosen = times(256, (192, TALL, 21.0), (130, config(130, 160, 2), 16.0)).config(KERNEL)
    assert chosen == KERNEL.config(rows(256), TARGET)


def test_without_a_model_of_configurations_the_nearest_decides() -> None:
    plain = dataclasses.replace(KERNEL, estimate_config=None)
    assert times(130, *RECORDS).config(plain) == NARROW


def test_the_model_of_a_configuration_is_that_of_the_choice() -> None:
    for m in (80, 100, 160, 300):
        best, tuned = gemm_ws.ranked(FORM, m, 6144, 4096, 132)[0]
        assert KERNEL.estimate_config is not None
        assert KERNEL.estimate_config(rows(m), tuned, TARGET) == best
