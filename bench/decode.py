"""End-to-end decoding: a model with random weights generates one token after another, and its time is split by part.

`step`: a step of the engine as a caller sees it: scheduling, inputs to the device, the decode graph, sampled ids back. `device`: the
graph alone, replayed back to back. `linear`: the model's linear layers alone, in the model's order, as a graph of their own; `head`:
the logits head likewise; `norm`: the norms between the blocks, which complete the sums over ranks. Weights of a large model do not stay
in a cache from one replay to the next. `floor`: the bytes of weights over the measured read bandwidth of the device.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from gristmill.autotune.captures import capturing
from gristmill.autotune.floor import ceilings
from gristmill.bench.device_trace import Trace, recorded, summary
from gristmill.bench.shapes import ShapeError
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.scheme import cdiv
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.decode_graphs import LARGEST, padded
from gristmill.runtime.engine import Engine
from gristmill.runtime.explain import explain_plans, summarize
from gristmill.runtime.kv_cache.paged import PagedCache, token_bytes
from gristmill.runtime.layers.linear import Linear, PartialSum, SplitLinear
from gristmill.runtime.layers.norm import RMSNorm
from gristmill.runtime.loader.config import parse_config
from gristmill.runtime.models import Model, families, model_table
from gristmill.runtime.parallel.mesh import ALONE, Mesh
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import SchedulerConfig
from gristmill.tools.calibration import find_linears
from gristmill.tools.random_model import random_model

WARM_STEPS = 4
TRACED_STEPS = 16
CHUNK = 256
"""Prompt tokens of a step."""


def model_config(shape: Mapping[str, Any]) -> ModelConfig:
    """The runtime's configuration of a model with the sizes of `shape`; ShapeError if the runtime has no such model."""
    kind = str(shape["model_type"])
    known = {kind: name for family in families().values() for name, kind in family.architectures.items()}
    if kind not in known:
        raise ShapeError(f"model_type {kind!r}: decoding is measured for {', '.join(sorted(known))}")
    data = {
        "architectures": [known[kind]],
        "max_position_embeddings": 8192,
        "dtype": "bfloat16",
        "rope_parameters": shape.get("rope_scaling") or {"rope_type": "default"},
        **shape,
    }
    config = parse_config({**data, "quantization_config": None})
    if any(weight.stacked for weight in model_table(config).weights):
        raise ShapeError(
            f"model_type {kind!r} has its experts in one tensor: decoding is measured for models whose experts are apart"
        )
    return config


def measure_decode(
    config: ModelConfig,
    quant: str,
    batches: tuple[int, ...],
    context: int,
    steps: int,
    device: str,
    policy: Policy | None = None,
    mesh: Mesh = ALONE,
    trace: bool = False,
) -> Iterator[dict[str, Any]]:
    """A row for each batch: milliseconds per step, with samples, and what they consist of.

    Args:
        quant: the scheme of linear weights; ``bf16`` keeps them.
        context: tokens of a prompt; `steps` steps follow it and are measured.
        mesh: the mesh of this rank; all ranks of a group measure together.
        trace: of a GPU: also `trace`, the kernels of a step as CUPTI records them.
    """
    begin = time.perf_counter()
    with torch.inference_mode():
        model = random_model(config, "bf16", None if quant == "bf16" else quant, device, policy, mesh=mesh)
    _wait(device)
    made = time.perf_counter() - begin
    for batch in batches:
        row = {"quant": quant, "batch": batch, "context": context, "steps": steps, "load_s": made}
        yield row | _decode(model, batch, context, steps, device, trace)


def _decode(model: Model, batch: int, context: int, steps: int, device: str, trace: bool) -> dict[str, Any]:
    chunk = max(CHUNK, batch)
    # Requests with earlier prompts are ahead by the steps that the other prompts take.
    length = steps + WARM_STEPS + 2 * batch * context // chunk + 2
    blocks = cdiv(context + length, 16) * batch
    plans = model.plans
    cache = PagedCache(model.config, blocks, 16, plans.dtype, plans.device)
    runner = Runner(model, cache, decode_graphs=True, max_seqs=batch)
    engine = Engine.from_parts(
        runner,
        SchedulerConfig(num_blocks=blocks, max_batch_tokens=chunk, max_seqs=batch, prefix_caching=False),
        async_steps=False,  # a step is measured from its scheduling to its ids
    )
    draw = random.Random(0)
    for index in range(batch):
        prompt = [draw.randrange(model.config.vocab_size) for _ in range(context)]
        engine.add_request(str(index), prompt, SamplingParams(max_tokens=length, ignore_eos=True))
    decoding: set[str] = set()
    while len(decoding) < batch:
        decoding.update(output.id for output in engine.step())
    taken: list[float] = []
    for _ in range(WARM_STEPS + steps):
        begin = time.perf_counter()
        engine.step()  # the step ends when the ids are on the host
        taken.append((time.perf_counter() - begin) * 1e3)
    graphs = runner.decode.explain() if runner.decode is not None else []
    if not any(graph["steps"] for graph in graphs if graph["seqs"]):
        raise ValueError(f"no decode step ran as a graph: {'; '.join(graph['reason'] for graph in graphs)}")
    engine.abort([str(index) for index in range(batch)])
    step = taken[WARM_STEPS:]
    traced = {"trace": asdict(_trace(_graph_of(runner, batch, context), batch))} if trace else {}
    return (
        _parts(model, runner, batch, context, device)
        | traced
        | {
            "step_ms": statistics.median(step),
            "tokens_per_s": batch / statistics.median(step) * 1e3,
            "step_samples_ms": step,
            "graphs": graphs,
            "kernels": summarize(explain_plans(plans)),
        }
    )


def _parts(model: Model, runner: Runner, batch: int, context: int, device: str) -> dict[str, Any]:
    """Times of the device and of the linear layers, and the floors of what they read."""
    rows = padded(batch) if batch <= LARGEST else batch
    linears = [layer for _, _, layer in find_linears(model.layers) if isinstance(layer, Linear | SplitLinear)]  # type: ignore[attr-defined]
    inputs = {layer: _input(layer, rows, model) for layer in [*linears, model.head]}  # type: ignore[attr-defined]
    whole = _samples(_graph_of(runner, batch, context), device)
    linear = _samples(_captured(lambda: [layer(inputs[layer]) for layer in linears], device), device)
    head = _samples(_captured(lambda: model.head(inputs[model.head]), device), device)  # type: ignore[attr-defined]
    norm = _samples(_captured(_norms(model, rows), device), device)
    weights = sum(_bytes(layer) for layer in linears)
    head_bytes = _bytes(model.head)  # type: ignore[attr-defined]
    cached = batch * context * token_bytes(model.config, model.plans.dtype)
    rate = ceilings(device).read_gbs
    ms = {"device_ms": whole, "linear_ms": linear, "head_ms": head, "norm_ms": norm}
    medians: dict[str, Any] = {name: statistics.median(values) for name, values in ms.items()}
    return medians | {
        "linear_share": medians["linear_ms"] / medians["device_ms"],
        "linear_floor_ms": weights / rate / 1e6,
        "floor_ms": (weights + head_bytes + cached) / rate / 1e6,
        "read_gbs": rate,
        "linear_bytes": weights,
        "head_bytes": head_bytes,
        "kv_bytes": cached,
        "weight_bytes": model.plans.weight_bytes,
        "samples_ms": ms,
    }


def _graph_of(runner: Runner, batch: int, context: int) -> Callable[[], Any]:
    """The decode graph of the steps, as a call; the uncaptured function if there is no graph."""
    decode = runner.decode
    if decode is None:
        raise ValueError("the runner has no decode graphs")
    graph = decode.graph(batch, context + 1)
    return graph.graph.replay if graph.captured else lambda: decode.compute(graph)


def _trace(replay: Callable[[], Any], batch: int) -> Trace:
    """Of replays back to back. In the first one, which is left out, a rank waits for others whose profilers start later."""

    def run() -> None:
        for _ in range(TRACED_STEPS + 1):
            replay()
        torch.cuda.synchronize()

    spans = recorded(run)
    return summary(spans[len(spans) // (TRACED_STEPS + 1) :], batch, TRACED_STEPS)


def _norms(model: Model, rows: int) -> Callable[[], Any]:
    """The norms that add to the residual, in the model's order, each on its own rows; of several ranks, on what they sum."""
    norms = [norm for layer in model.layers for norm in vars(layer).values() if isinstance(norm, RMSNorm)]  # type: ignore[attr-defined]
    norms.append(model.norm)  # type: ignore[attr-defined]
    plans = model.plans
    x, residual = (
        torch.zeros(rows, model.config.hidden_size, dtype=plans.dtype, device=plans.device) for _ in range(2)
    )
    first, *others = norms
    part = PartialSum(x) if plans.mesh.world > 1 else x
    return lambda: [first.add(x, residual), *(norm.add(part, residual) for norm in others)]


def _input(layer: Linear | SplitLinear, rows: int, model: Model) -> torch.Tensor:
    weight = layer.parts[0].weight if isinstance(layer, SplitLinear) else layer.weight
    return torch.randn(rows, weight.k, device=model.plans.device, dtype=torch.float32).to(model.plans.dtype)


def _bytes(layer: Linear | SplitLinear) -> int:
    """Bytes of the weights by their scheme, without the padding of a layout."""
    weights = [part.weight for part in layer.parts] if isinstance(layer, SplitLinear) else [layer.weight]
    return sum(weight.scheme.weight_bytes(weight.n, weight.k) for weight in weights)


def _captured(call: Callable[[], Any], device: str) -> Callable[[], Any]:
    """The call as the replay of a CUDA graph, on a GPU."""
    with torch.inference_mode():
        call()
        if not device.startswith("cuda"):
            return torch.inference_mode()(call)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, stream=stream):
            call()
        return graph.replay


def _samples(call: Callable[[], Any], device: str, rounds: int = 21) -> list[float]:
    """Milliseconds per call, of calls back to back."""
    for _ in range(3):
        call()
    _wait(device)
    if not device.startswith("cuda"):
        times = []
        for _ in range(rounds):
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e3)
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    for mark in marks:
        call()
        mark.record()
    marks[-1].synchronize()
    return [before.elapsed_time(after) for before, after in zip(marks, marks[1:], strict=False)]


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
