"""A replica without a model: the output repeats the prompt. It speaks the protocol of `EngineHost`, one step for all requests, and costs
nothing, so that what is measured and broken is the front end. It does not import torch, which a process of its own would wait for."""

from __future__ import annotations

import itertools
import os
import pickle
import time
from multiprocessing.connection import Connection
from typing import Any

from gristmill.runtime.engine_load import EngineLoad
from gristmill.runtime.errors import UsageError
from gristmill.runtime.parallel import child_process
from gristmill.runtime.scheduler import FinishReason

POISON, HANG, REFUSED = 666, 667, 668
"""Prompts that begin with these end the process, stop it, and are refused."""


def serve(connection: Connection) -> None:
    """Steps of FAKE_STEP seconds while there are requests. FAKE_LIVES: a file that says how many more starts succeed."""
    connection.recv()
    if (lives := os.environ.get("FAKE_LIVES")) is not None:
        with open(lives, "r+") as file:
            left = int(file.read())
            file.seek(0)
            file.write(f"{left - 1:05}")
        if left <= 0:
            raise RuntimeError("no life is left")
    for done in range(weights := int(os.environ.get("FAKE_WEIGHTS", "0"))):
        connection.send(("loading", "weights", done, weights))
    connection.send(("loaded",))
    seconds = float(os.environ.get("FAKE_STEP", "0"))
    running: dict[str, tuple[Any, int]] = {}
    calls: list[Any] = []
    admitted: list[tuple[str, int]] = []
    while True:
        while not running or connection.poll(0):
            kind, *arguments = connection.recv()
            if kind == "add":
                ids, prompt, params, *_ = arguments
                if prompt[0] == POISON:
                    os._exit(3)
                if prompt[0] == HANG:
                    time.sleep(1000)
                if prompt[0] == REFUSED:
                    connection.send(("refused", ids[0], UsageError("this prompt is refused")))
                    continue
                for id_, wanted in zip(ids, params, strict=True):
                    running[id_] = itertools.cycle(prompt), wanted.max_tokens
                    admitted.append((id_, 0))
            elif kind == "abort":
                for id_ in arguments[0]:
                    running.pop(id_, None)
            elif kind == "ping":
                connection.send(("pong",))
            elif kind == "call":
                number, name, given = arguments
                calls.append((name, given))
                answer = calls if name == "dump" else len(running)
                # What the front cannot take: no field of a step.
                connection.send(("step",) if name == "explain" else ("result", number, answer))
        if seconds:
            time.sleep(seconds)
        outputs: list[Any] = []
        for id_, (ids, left) in list(running.items()):
            if left == 1:
                del running[id_]
                outputs.append((id_, (next(ids),), 0, FinishReason.LENGTH, (), None, None))
            else:
                running[id_] = ids, left - 1
                outputs.append((id_, (next(ids),), 0))
        step = ("step", EngineLoad(len(running)), time.monotonic(), admitted, (), outputs)
        connection.send_bytes(pickle.dumps(step, pickle.HIGHEST_PROTOCOL))
        admitted = []


if __name__ == "__main__":
    child_process.serve(serve)
