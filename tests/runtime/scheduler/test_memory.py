"""A long run leaks nothing, and a step is cheap."""

import gc
import random
import statistics
import sys
import time
import tracemalloc

from gristmill.runtime.scheduler import Request, Scheduler, SchedulerConfig

STEPS = 100_000


def serve(scheduler: Scheduler, steps: int, rng: random.Random, number: int) -> tuple[int, int]:
    """Keeps the queue filled for `steps` steps; returns the next request number and the number of
    preemptions."""
    preemptions = 0
    for _ in range(steps):
        while len(scheduler.waiting) < 2:
            tokens = [rng.randrange(8) for _ in range(rng.randint(1, 14))]
            scheduler.add(Request(str(number), tokens, rng.randint(1, 8)))
            number += 1
        plan = scheduler.plan()
        scheduler.commit(plan)
        preemptions += len(plan.preempted)
        scheduler.update(plan, [rng.randrange(8) for entry in plan.entries if entry.samples])
        if number % 97 == 0:
            scheduler.abort([scheduler.running[0].id] if scheduler.running else [])
    return number, preemptions


def test_memory_is_constant_over_100000_steps() -> None:
    """The cycle collector is off, so that anything not freed by reference counts alone would accumulate."""
    scheduler = Scheduler(
        SchedulerConfig(num_blocks=12, block_size=4, max_seqs=3, max_batch_tokens=16, watermark=0)
    )
    rng = random.Random(0)
    number, preemptions = serve(scheduler, 2_000, rng, 0)
    gc.collect()
    gc.disable()
    try:
        blocks_before, objects_before = sys.getallocatedblocks(), len(gc.get_objects())
        number, more = serve(scheduler, STEPS, rng, number)
        blocks_after, objects_after = sys.getallocatedblocks(), len(gc.get_objects())
    finally:
        gc.enable()
    assert number > 10_000 and preemptions + more > 1_000  # the run was busy
    assert blocks_after - blocks_before < 2_000, "allocated blocks of the interpreter grew"
    assert objects_after - objects_before < 1_000, "objects known to the collector grew"
    scheduler.check()


def test_traced_memory_of_a_shorter_run_is_constant() -> None:
    scheduler = Scheduler(
        SchedulerConfig(num_blocks=12, block_size=4, max_seqs=3, max_batch_tokens=16, watermark=0)
    )
    rng = random.Random(1)
    number, _ = serve(scheduler, 1_000, rng, 0)
    tracemalloc.start()
    try:
        number, _ = serve(scheduler, 1_000, rng, number)
        before, _ = tracemalloc.get_traced_memory()
        serve(scheduler, 5_000, rng, number)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 30_000


def test_a_step_of_256_decodes_is_well_under_a_millisecond() -> None:
    """Bounds the median processor time of plan + commit + update, about 0.45 ms, with room for slower cores."""
    scheduler = Scheduler(SchedulerConfig(num_blocks=20_000, max_batch_tokens=8192))
    for i in range(256):
        scheduler.add(Request(str(i), [i] * 20, 400))
    times = []
    while len(times) < 300:
        begin = time.process_time()
        plan = scheduler.plan()
        scheduler.commit(plan)
        scheduler.update(plan, [5] * len(plan.sampling()))
        times.append(time.process_time() - begin)
    assert plan.num_tokens == 256
    assert statistics.median(times) < 1.5e-3


def test_a_long_blocked_queue_does_not_slow_a_step() -> None:
    """The scan past blocked requests is bounded: 20,000 waiting requests cost as much as 200."""

    def step_seconds(queue: int) -> float:
        scheduler = Scheduler(
            SchedulerConfig(num_blocks=100, block_size=4, max_batch_tokens=512, max_bypass=10**9)
        )
        scheduler.add(Request("old", [1] * 200, 150))
        scheduler.commit(plan := scheduler.plan())
        scheduler.update(plan, [1])
        for i in range(queue):
            scheduler.add(Request(str(i), [i % 7] * 300, 5))
        times = []
        for _ in range(20):
            begin = time.process_time()
            scheduler.plan()
            times.append(time.process_time() - begin)
        return min(times)

    assert step_seconds(20_000) < 5 * step_seconds(200)
