"""Steps as messages: a rank has the same entries as the driver, whatever was added, preempted or ended; and rank 0 answers others."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from gristmill.autotune.packing import plan_layouts
from gristmill.autotune.resolve import Resolver
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.select import NoKernelError
from gristmill.runtime.errors import RankError
from gristmill.runtime.logits_processors import LogitsProcessors
from gristmill.runtime.parallel.choices import Asking, answer_in_threads
from gristmill.runtime.parallel.wire import Mirror, Sender, Step
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import ScheduledRequest
from tests.runtime.processed import apply, cpu_plans

GREEDY, WARM = SamplingParams(), SamplingParams(temperature=1.0)


class Pair:
    """A sender and a mirror, with a pickled message between them."""

    def __init__(self) -> None:
        self.sender = Sender()
        self.processors = LogitsProcessors(64, cpu_plans())
        self.mirror = Mirror(self.processors)

    def send(self, entries: list[ScheduledRequest], rows: list[SamplingRow]) -> Step:
        """Returns the message; the mirror must read the same from it."""
        message: Step = pickle.loads(pickle.dumps(self.sender.step(entries, rows)))
        sent = pickle.loads(pickle.dumps(message))
        assert self.mirror.read(message) == (entries, rows)
        return sent


def entry(
    name: str, start: int, tokens: list[int] | None, table: list[int], new: int = 0
) -> ScheduledRequest:
    count = 1 if tokens is None else len(tokens)
    return ScheduledRequest(name, start, count, True, tokens, table, table[len(table) - new :], row=3)


def test_tables_are_sent_once_and_then_what_was_added() -> None:
    pair, table, other = Pair(), [7, 2], [5]
    first = pair.send(
        [entry("a", 0, [1, 2, 3], table), entry("b", 4, [9], other)],
        [SamplingRow(GREEDY, 1, 0), SamplingRow(WARM, 2, 4)],
    )
    assert [e[-2] for e in first.entries] == [[7, 2], [5]] and [r[0] for r in first.rows] == [GREEDY, WARM]
    table.append(11)
    second = pair.send([entry("a", 3, None, table)], [SamplingRow(GREEDY, 1, 1)])
    assert second.entries[0][-2:] == (None, [11]) and second.rows[0][0] is None
    preempted = [11, 7, 2]  # the same blocks in another order, and as many
    third = pair.send([entry("a", 0, [1, 2, 3, 4], preempted)], [SamplingRow(GREEDY, 1, 1)])
    assert third.entries[0][-2] == preempted
    pair.sender.remove("a")
    fourth = pair.send([entry("b", 5, [8], other), entry("a", 0, [6], [1])], [SamplingRow(WARM, 2, 5)] * 2)
    assert fourth.ended == ["a"] and fourth.entries[1][-2] == [1]
    assert len(pickle.dumps(second)) < 400


def test_ranks_know_the_tokens_of_processed_requests() -> None:
    pair, tokens = Pair(), [1, 2, 3]
    params = SamplingParams(repetition_penalty=2.0)
    pair.sender.add("a", params, tokens, 3, [0])
    assert "a" in pair.sender and len(pair.sender) == 1
    pair.send([entry("a", 0, [1, 2, 3], [4])], [SamplingRow(params, 0, 0)])
    tokens += [9]
    assert pair.send([entry("a", 3, [9], [4])], [SamplingRow(params, 0, 1)]).grown == {"a": [9]}
    logits = torch.ones(1, 64)
    assert sorted((apply(pair.processors, logits, ["a"])[0] != 1).nonzero().flatten().tolist()) == tokens
    pair.sender.remove("a")
    pair.send([entry("b", 0, [1], [4])], [SamplingRow(GREEDY, 0, 0)])
    assert len(pair.processors) == 0


def test_new_ranks_are_told_everything() -> None:
    pair, table, tokens = Pair(), [7, 2], [1, 2]
    pair.sender.add("a", WARM, tokens, 2, [])
    pair.send([entry("a", 0, [1, 2], table)], [SamplingRow(WARM, 0, 0)])
    pair.sender.reset()
    pair.mirror = Mirror(LogitsProcessors(64, cpu_plans()))
    again = pair.send([entry("a", 0, [1, 2], table)], [SamplingRow(WARM, 0, 0)])
    assert again.entries[0][-2] == table and again.rows[0][0] == WARM and "a" in again.processed


def test_rank_0_chooses_for_the_others(policy: Policy, tmp_path: Path) -> None:
    policy = replace(policy, cache=str(tmp_path))  # where nothing is verified yet
    here, there = Pipe()
    first, other = Resolver("cpu", policy), Resolver("cpu", policy)
    answer_in_threads(first, [here])
    other.chooser = Asking(there)
    op = first.registry.op("rms_norm")
    problem = op.problem("m=4,n=64,x=fp32")
    chosen, own = other.resolve(op, problem).require(), first.resolve(op, problem).require()
    assert (chosen.kernel.name, chosen.config) == (own.kernel.name, own.config)
    assert not other.store.verifications, "only rank 0 verifies"
    linear = first.registry.op("linear")
    static = linear.static(linear.problem("m=1,n=64,k=64,x=fp32,w=fp32"))
    assert other.plan(linear, static, (1,)).digest() == first.plan(linear, static, (1,)).digest()
    assert plan_layouts(other, static) == plan_layouts(first, static)
    assert not other.store.verifications
    both = op, first.registry.op("silu_and_mul")
    tasks = [(each, each.problem(f"m={m},n=64,x=fp32"), None) for m in (1, 2, 8) for each in both]
    other.resolve_all(tasks, 2)
    assert {(task[0].name, str(task[1])) for task in tasks} <= {
        (record.op, record.problem) for record in first.store.verifications.values()
    }
    with ThreadPoolExecutor(6) as pool:  # whose answers do not get mixed up
        answers = list(pool.map(lambda task: other.resolve(*task).require(), tasks * 20))
    assert answers == [other.resolve(*task).require() for task in tasks] * 20
    nothing = Policy(cache=policy.cache, exclude=("*",))
    refusing, asker = Pipe()
    answer_in_threads(Resolver("cpu", nothing), [refusing])
    other.chooser = Asking(asker)
    with pytest.raises(NoKernelError, match="no kernel for rms_norm"):
        other.resolve(op, problem)
    gone, asker = Pipe()
    gone.close()
    other.chooser = Asking(asker)
    with pytest.raises(RankError, match="rank 0 ended before it chose a kernel"):
        other.resolve(op, problem)
