"""Measuring on a GPU: audited candidates, kernels that cheat with streams, comparisons, ceilings, tuning."""

from __future__ import annotations

import gc

import pytest
import torch

from gristmill.autotune.candidate import Candidate, WrongResultError
from gristmill.autotune.disturbance import GPU_REASONS
from gristmill.autotune.floor import remeasure
from gristmill.autotune.options import Job
from gristmill.autotune.place import place
from gristmill.autotune.rotation import Rotation
from gristmill.autotune.tune import tune
from gristmill.bench.compare import Case, compare
from gristmill.bench.statistics.noise import self_test
from gristmill.bench.statistics.verdict import FASTER, SLOWER, Rule
from gristmill.bench.timings import TIMINGS, kernel_rows
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.store import Store
from tests.calls import positional

pytestmark = pytest.mark.gpu
OP = default_registry().op("rms_norm")
PROBLEM = "m=4096,n=8192"
STATE: dict = {}


@positional
def honest(config, x, weight, eps, out):
    out.copy_(OP.reference(x, weight, eps))


@positional
def work_left_on_another_stream(config, x, weight, eps, out):
    stream = STATE.setdefault("stream", torch.cuda.Stream())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out.copy_(OP.reference(x, weight, eps))


@positional
def work_started_early_on_another_stream(config, x, weight, eps, out):
    """Does not wait for the stream that it is called on, so its results exist before its turn."""
    with torch.cuda.stream(STATE.setdefault("stream", torch.cuda.Stream())):
        out.copy_(OP.reference(x, weight, eps))


@positional
def work_handed_over_and_back(config, x, weight, eps, out):
    """An honest kernel: its stream waits for the work that it gives to another stream."""
    work_left_on_another_stream(config, x, weight, eps, out)
    torch.cuda.current_stream().wait_stream(STATE["stream"])


@positional
def results_cached_by_pointer(config, x, weight, eps, out):
    key = (x.data_ptr(), out.data_ptr())
    if key not in STATE:
        STATE[key] = OP.reference(x, weight, eps)
    out.copy_(STATE[key])


def kernel(function, **more) -> Kernel:
    return Kernel(
        op="rms_norm",
        name=function.__name__,
        provider="test",
        language="python",
        target=f"{__name__}:{function.__name__}",
        requires=Requirement(),
        **more,
    )


def candidate(spec: Kernel, problem: str = PROBLEM, *, hot: bool = False) -> Candidate:
    config = spec.config(OP.problem(problem), place(None).target)
    measured = Candidate(spec, config, Rotation(OP, spec, OP.problem(problem), "cuda:0", hot=hot))
    for _ in range(6):
        measured.sample()
    measured.conclude()
    return measured


@pytest.fixture(autouse=True)
def clean():
    STATE.clear()


def test_an_honest_kernel_passes_captured_and_eager() -> None:
    assert (
        candidate(kernel(honest)).timing == "graph,cold"
        and candidate(kernel(honest, capturable=False)).error == 0.0
    )
    measured = candidate(default_registry().kernel("rms_norm", "rms_norm_triton"))
    assert measured.repeatable and measured.samples[-1] > 10


@pytest.mark.parametrize("hot", [True, False])
@pytest.mark.parametrize("capturable", [True, False])
@pytest.mark.parametrize("cheat", [work_left_on_another_stream, work_started_early_on_another_stream])
def test_work_left_on_another_stream_is_caught(cheat, capturable: bool, hot: bool) -> None:
    for problem in (PROBLEM, "m=64,n=2048"):  # a long call, and one that is nearly done when it returns
        # The error is infinite where poison is left, and finite where it has been overwritten.
        with pytest.raises(WrongResultError, match="cannot be captured|over the tolerance|changed after"):
            candidate(kernel(cheat, capturable=capturable), problem, hot=hot)


@pytest.mark.parametrize("hot", [True, False])
def test_work_that_is_waited_for_is_none_of_that(hot: bool) -> None:
    for problem in (PROBLEM, "m=64,n=2048"):
        assert (
            candidate(kernel(work_handed_over_and_back, capturable=False), problem, hot=hot).timing
            == f"eager,{'hot' if hot else 'cold'}"
        )


@pytest.mark.parametrize("capturable", [True, False])
def test_cached_results_are_caught(capturable: bool) -> None:
    with pytest.raises(WrongResultError, match="over the tolerance"):
        candidate(kernel(results_cached_by_pointer, capturable=capturable))


def test_comparisons_are_right_and_quiet(policy_file) -> None:
    policy_file()
    device, registry = place(None), default_registry()
    triton, torch_kernel = (registry.kernel("rms_norm", f"rms_norm_{name}") for name in ("triton", "torch"))
    row = compare([Case(OP, OP.problem(PROBLEM), torch_kernel, (triton,))], device, Rule(), seconds=10)[0]
    assert row.verdict in (FASTER, SLOWER) and row.noise is not None and row.noise < 0.02, row
    shared = Rotation(OP, triton, OP.problem(PROBLEM), "cuda:0")
    configuration = self_test(
        lambda name: Candidate(triton, triton.config(OP.problem(PROBLEM), device.target), shared, name=name),
        Rule(),
        comparisons=20,
    )
    assert configuration.false == 0 and configuration.floor < 0.02, configuration


@pytest.mark.alone
def test_five_timings_stand_side_by_side(policy_file) -> None:
    policy_file()
    triton, torch_kernel = (
        default_registry().kernel("rms_norm", f"rms_norm_{name}") for name in ("triton", "torch")
    )
    row = kernel_rows(
        OP, OP.problem("m=16,n=4096"), [triton], place(None), baseline=torch_kernel, seconds=0.2
    )[0]
    # The isolated timing is taken as the kernel is deployed, in a graph, and not also eagerly.
    expected = tuple(timing for timing in TIMINGS if timing != "eager,cold,isolated")
    assert not row["reason"], row["reason"]
    assert tuple(row["times"]) == expected and row["timing"] == "graph,cold" and row["speedup"] > 0
    # Launching this kernel takes longer on the host than running it takes on the device.
    assert (
        row["times"]["eager,cold"]["us"]
        > row["times"]["graph,cold"]["us"]
        >= 0.8 * row["times"]["graph,hot"]["us"]
    )


def test_an_old_graph_freed_meanwhile_does_not_spoil_a_capture() -> None:
    spec = default_registry().kernel("rms_norm", "rms_norm_triton")
    problem = OP.problem("m=16,n=4096")
    config, rotation = spec.config(problem, place(None).target), Rotation(OP, spec, problem, "cuda:0")
    before = gc.get_threshold()
    gc.set_threshold(1)  # collects at nearly every allocation
    try:
        for _ in range(5):
            measured = Candidate(spec, config, rotation)
            measured.self = measured  # a cycle: only a collection frees its graph
            measured.sample()
    finally:
        gc.set_threshold(*before)


def test_ceilings_say_what_held_the_device_back(policy_file) -> None:
    policy_file()
    measured = remeasure("cuda:0")
    assert measured.read_gbs > 100 and dict(measured.tflops)["bf16"] > 10 and measured.launch_us > 0.2
    assert set(measured.throttled) <= set(GPU_REASONS.values())


def test_tuning_finds_nothing_slower_than_the_default(policy_file) -> None:
    policy_file()
    op = default_registry().op("linear")
    records: list = []
    job = Job(op, op.problem("m=16,n=4096,k=4096,w=int4_g128"))
    tuned = tune([job], place(None), lambda r: records.extend(r) or Store(), seconds=60, store=Store())[0]
    assert tuned.state == "tuned" and tuned.us is not None and tuned.default_us is not None
    assert tuned.us <= tuned.default_us * 1.001 and records
