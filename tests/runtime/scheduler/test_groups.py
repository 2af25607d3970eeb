"""Groups of layers: what a request holds, what a prefix needs, and what is told to others."""

import pytest

from gristmill.runtime.kv_cache import BlockPool, PrefixCache
from gristmill.runtime.kv_cache.groups import KVGroup, first_needed, make_groups
from gristmill.runtime.scheduler import Request, Scheduler, SchedulerConfig

from .harness import FakeModel, Run, expected_ids, run_all, step


def make(windows: tuple[int, ...] = (0, 8), **options) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            **{"num_blocks": 200, "block_size": 4, "windows": windows, "watermark": 0.0, **options}
        )
    )


def test_layers_of_a_kind_are_groups_of_equal_size() -> None:
    assert make_groups([8, 0, 8, 0]) == (KVGroup((1, 3)), KVGroup((0, 2), 8))
    assert make_groups([8, 0, 8]) == (KVGroup((1,)), KVGroup((0,), 8), KVGroup((2,), 8))
    assert make_groups([0, 8, 8, 8, 0]) == (KVGroup((0, 4)), KVGroup((1, 2), 8), KVGroup((3,), 8))
    assert make_groups([8, 8]) == make_groups([0, 0]) == (KVGroup((0, 1)),)


@pytest.mark.parametrize("window", [0, 1, 3, 4, 5, 8, 9])
def test_the_first_block_that_a_window_needs(window: int) -> None:
    for computed in range(40):
        read = [p for p in range(computed + 1) if not window or p > computed - window]
        assert first_needed(window, computed, 4) == read[0] // 4


def test_a_long_request_holds_about_half() -> None:
    """Two groups of one size: of 100 tokens, the window of 8 keeps 3 blocks of 25."""
    scheduler, run = make(), Run()
    model = FakeModel(scheduler.config)
    scheduler.add(Request("r", list(range(96)), 5))
    most = 0
    while scheduler.has_unfinished():
        step(scheduler, model, run)
        most = max(most, scheduler.pool.num_referenced) if run.steps > 1 else 0
    assert most == 25 + 3


def test_chunks_of_a_prompt_that_fits_only_because_blocks_are_given_back() -> None:
    """30 blocks hold 15 rows of both groups; with the window 24 rows run, alone and two at a time in flight."""
    for depth in (1, 2):
        scheduler = make(num_blocks=30, max_batch_tokens=8, max_seqs=4)
        capacity = scheduler.config.capacity
        assert capacity == 25 * 4
        prompts = {str(i): list(range(i, capacity - 2)) for i in range(3)}
        run = run_all(scheduler, [Request(name, p, 9) for name, p in prompts.items()], depth=depth)
        for name, prompt in prompts.items():
            assert run.outputs[name] == expected_ids(prompt, 9, capacity=capacity)


def test_a_prefix_is_found_by_its_last_window_alone() -> None:
    """The window's blocks at the front were given away; those of the last window serve a request with the whole prefix."""
    scheduler, tokens = make(), list(range(40))
    model = FakeModel(scheduler.config)
    run_all(scheduler, [Request("a", tokens, 1)], model)
    for entry in list(scheduler.cache._table.values()):
        if entry.tokens[0] < 28:  # only positions 33 to 39 are read after a prefix of 40
            scheduler.pool.take(entry.blocks[1])
            scheduler.pool.release([scheduler.pool.refs.index(1)])
    again, shorter = Request("b", [*tokens, 7], 2), Request("c", tokens[:32], 2)
    run_all(scheduler, [again, shorter], model)
    assert (again.cached_tokens, shorter.cached_tokens) == (40, 0)
    assert again.output_ids == expected_ids([*tokens, 7], 2)


def test_groups_agree_on_a_prefix() -> None:
    """The fixed point: the second window's blocks end before the first one's begin."""
    pool = BlockPool(40, 1)
    cache = PrefixCache(pool, windows=(0, 3, 2))
    tokens, hashes, parent = list(range(9)), [], None
    cache.extend_hashes(hashes, tokens)
    have = {1: {0, 1, 2, 5, 6, 7}, 2: {0, 1, 2, 3, 4}}
    for i in range(8):
        blocks = pool.allocate(3)
        kept = [b if g == 0 or i in have[g] else pool.num_blocks for g, b in enumerate(blocks)]
        parent = cache.insert(hashes[i], tokens[i : i + 1], None, parent, *kept)
    assert len(cache.match(hashes, tokens)) == 3
    table = cache.table(cache.match(hashes, tokens))
    null = pool.num_blocks
    assert [[b == null for b in table[g::3]] for g in range(3)] == [
        [False, False, False],
        [True, False, False],
        [True, True, False],
    ]
    cache.check()


def test_cached_tokens_are_counted_once_for_all_groups_and_admissions() -> None:
    scheduler = make(windows=(0, 8, 8))
    model = FakeModel(scheduler.config)
    run_all(scheduler, [Request("a", list(range(40)), 1)], model)
    again = Request("b", list(range(41)), 2)
    run_all(scheduler, [again], model)
    assert again.cached_tokens == 40


def test_events_follow_the_first_group() -> None:
    scheduler = make()
    scheduler.cache.record_events(True)
    run_all(scheduler, [Request("a", list(range(40)), 1)])
    [event] = scheduler.cache.take_events()
    assert len(event.block_hashes) == 10
    for entry in list(scheduler.cache._table.values()):
        scheduler.pool.take(entry.blocks[1])
    assert scheduler.cache.take_events() == []


def test_a_preempted_request_is_shown_with_its_blocks() -> None:
    scheduler = make(num_blocks=12, windows=(0,), max_seqs=3, max_batch_tokens=16)
    model, seen = FakeModel(scheduler.config), []

    def copy(request: Request) -> None:
        state = 0
        for position in range(request.computed):
            slot = request.block_ids[position // 4] * 4 + position % 4
            seen.append(model.kv[slot])
            assert seen[-1] != state
            state = seen[-1]

    scheduler.on_preempt = copy
    run = run_all(scheduler, [Request(str(i), list(range(i, i + 9)), 14) for i in range(3)], model)
    assert run.preemptions and seen


def test_the_first_group_must_be_full_attention() -> None:
    with pytest.raises(ValueError, match="windows must begin with 0"):
        make(windows=(8, 0))
