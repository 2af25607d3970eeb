"""The block pool and the prefix cache, without a scheduler."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.runtime.kv_cache import BlockPool, PoolError, PoolTransaction, PrefixCache, blocks_needed


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (31, 2), (32, 2), (33, 3)]
)
def test_blocks_needed_at_the_edges(tokens: int, blocks: int) -> None:
    assert blocks_needed(tokens, 16) == blocks


def test_unhashed_blocks_are_taken_first_and_hashed_ones_last() -> None:
    pool = BlockPool(6, 4)
    a, b, c, d = pool.allocate(4)
    pool.register(a, "A")
    pool.register(c, "C")
    pool.release([a, b, c, d])
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == (4, 2, 0)
    pool.check()
    assert set(pool.allocate(4)) == {b, d, 4, 5}  # hashed blocks are taken only after all others
    assert pool.num_cached == 2
    assert pool.allocate(2) == [c, a]  # the end of the chain first
    assert pool.content == [None] * 6


def test_lru_order_is_refreshed_by_sharing() -> None:
    pool = BlockPool(3, 4)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.register(block, str(block))
        pool.release([block])
    pool.share(blocks[0])
    pool.release([blocks[0]])
    assert pool.allocate(3) == [blocks[1], blocks[2], blocks[0]]


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3, 4)
    with pytest.raises(PoolError, match="4 blocks asked for, 3 of 3"):
        pool.allocate(4)
    assert pool.num_available == 3
    pool.check()


def test_misuse_is_refused() -> None:
    pool = BlockPool(2, 4)
    (block,) = pool.allocate(1)
    with pytest.raises(PoolError, match="referenced 1 times"):
        pool.take(block)
    pool.release([block])
    with pytest.raises(PoolError, match="released twice"):
        pool.release([block])
    with pytest.raises(PoolError, match="nothing to share"):
        pool.share(block)
    with pytest.raises(PoolError, match="cannot be trusted"):
        pool.register(block, "x")
    with pytest.raises(ValueError, match="num_blocks >= 1"):
        BlockPool(0, 4)


@pytest.mark.parametrize("damage", ["refs", "queue", "count", "cached", "link"])
def test_check_sees_damage(damage: str) -> None:
    pool = BlockPool(4, 4)
    pool.register(pool.allocate(2)[0], "x")
    pool.check()
    if damage == "refs":
        pool.refs[0] = 0  # a leak: unreferenced, but not in the queue
    elif damage == "queue":
        pool.refs[3] = 1
    elif damage == "count":
        pool.num_available += 1
    elif damage == "cached":
        pool.num_cached += 1
    else:
        pool._prev[3] = 0
    with pytest.raises(PoolError, match="inconsistent"):
        pool.check()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12))
def test_a_plan_foretells_the_pool(seed: int, blocks: int) -> None:
    """Random operations through PoolTransaction, then applied to the pool: equal references, equal availability, a
    consistent queue."""
    rng = random.Random(seed)
    pool = BlockPool(blocks, 4)
    owned: list[int] = []
    for _ in range(20):
        before = (list(pool.refs), pool.queue(), list(pool.content))
        plan = PoolTransaction(pool)
        owned_by_plan = list(owned)
        for _ in range(rng.randint(1, 6)):
            choice = rng.random()
            if choice < 0.4 and plan.available:
                owned_by_plan += plan.take(rng.randint(1, plan.available))
            elif choice < 0.7 and owned_by_plan:
                released = rng.sample(owned_by_plan, rng.randint(1, len(owned_by_plan)))
                for block in released:
                    owned_by_plan.remove(block)
                plan.release(released)
            else:
                known = [b for b in range(blocks) if pool.content[b] is not None and b not in plan.evicted]
                if known:
                    shared = rng.choice(known)
                    plan.share([shared])
                    owned_by_plan.append(shared)
        assert before == (list(pool.refs), pool.queue(), list(pool.content)), "planning changed the pool"
        pool.apply(plan.ops)
        owned = owned_by_plan
        pool.check()
        assert pool.num_available == plan.available
        assert [plan.refs(b) for b in range(blocks)] == pool.refs == [owned.count(b) for b in range(blocks)]
        for block in set(owned):
            if pool.content[block] is None and rng.random() < 0.5:
                pool.register(block, object())


def fill(cache: PrefixCache, pool: BlockPool, tokens: list[int], extra: str | None = None) -> list[int]:
    """Registers all full blocks of `tokens` as a request would; returns its table."""
    hashes: list[int] = []
    cache.extend_hashes(hashes, tokens, extra)
    hits = cache.match(hashes, tokens, extra)
    for hit in hits:
        pool.share(hit.blocks[0])
    table = [hit.blocks[0] for hit in hits] + pool.allocate(
        blocks_needed(len(tokens), pool.block_size) - len(hits)
    )
    parent = hits[-1] if hits else None
    size = pool.block_size
    for i in range(len(hits), len(tokens) // size):
        parent = cache.insert(hashes[i], tokens[i * size : (i + 1) * size], extra, parent, table[i])
    return table


def hit_tokens(cache: PrefixCache, tokens: list[int], extra: str | None = None) -> int:
    hashes: list[int] = []
    cache.extend_hashes(hashes, tokens, extra)
    return 4 * len(cache.match(hashes, tokens, extra))


def test_match_is_longest_prefix_and_never_all() -> None:
    pool = BlockPool(20, 4)
    cache = PrefixCache(pool)
    tokens = list(range(12))
    fill(cache, pool, tokens)
    assert hit_tokens(cache, tokens) == 8  # 12 are cached; at least one token must be computed
    assert hit_tokens(cache, [*tokens, 99]) == 12
    assert hit_tokens(cache, tokens[:4]) == 0
    assert hit_tokens(cache, tokens[:5]) == 4
    assert hit_tokens(cache, [*tokens[:4], 7, *tokens[5:]]) == 4
    assert hit_tokens(cache, [99, *tokens]) == 0
    assert hit_tokens(cache, [*tokens, 99], "adapter") == 0
    cache.check()


def test_eviction_forgets_and_children_go_before_parents() -> None:
    pool = BlockPool(4, 4)
    cache = PrefixCache(pool)
    tokens = list(range(13))
    pool.release(fill(cache, pool, tokens))
    assert len(cache) == 3
    hits = []
    while pool.num_available:
        pool.allocate(1)
        cache.check()
        hits.append(hit_tokens(cache, tokens))
    assert hits == [12, 8, 4, 0]  # the partial block is evicted first, then the chain from its end


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["constant", "two"]))
def test_collisions_cost_a_miss_and_never_a_wrong_block(seed: int, kind: str) -> None:
    """With a useless hash function, every hit still holds exactly the requested prefix."""
    rng = random.Random(seed)
    pool = BlockPool(12, 2)
    cache = PrefixCache(pool, (lambda _: 0) if kind == "constant" else (lambda key: hash(key) % 2))
    holds: dict[int, tuple[object, ...]] = {}  # block -> extra key and all tokens up to its end, as computed
    for _ in range(30):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 8))]
        extra = rng.choice([None, "adapter"])
        hashes: list[int] = []
        cache.extend_hashes(hashes, tokens, extra)
        for i, hit in enumerate(cache.match(hashes, tokens, extra)):
            assert holds[hit.blocks[0]] == (extra, *tokens[: 2 * (i + 1)])
        table = fill(cache, pool, tokens, extra)
        for i in range(len(tokens) // 2):
            holds[table[i]] = (extra, *tokens[: 2 * (i + 1)])
        cache.check()
        pool.release(table)
        pool.check()


def test_a_cache_owns_its_pool() -> None:
    pool = BlockPool(4, 4)
    cache = PrefixCache(pool)
    with pytest.raises(ValueError, match="already serves"):
        PrefixCache(pool)
    with pytest.raises(PoolError, match="only full blocks"):
        cache.insert(1, [1, 2], None, None, pool.allocate(1)[0])
