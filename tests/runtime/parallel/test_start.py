"""Two ranks start with an empty store: rank 0 verifies for both, beside loading, each kernel once; the next start verifies nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.select import NoKernelError
from gristmill.runtime.llm import LLM
from gristmill.runtime.parallel import rank_processes
from gristmill.runtime.progress import progress_to
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.verify_ahead import UNCERTAIN
from tests.runtime import oracle
from tests.runtime.oracle import LLAMA, MODELS
from tests.runtime.parallel import planted_rank

LIMITS = {"num_blocks": 40, "max_batch_tokens": 32, "max_seqs": 4, "max_model_len": 200}
TOGETHER = {"all_reduce", "all_gather", "all_reduce_add_rms_norm"}


@dataclass
class Start:
    """Starts ranks that keep a log, over a store of their own.

    Attributes:
        planted: as `planted_rank.PLANTED`.
    """

    make: Callable[..., LLM]
    policy: Policy
    log: Path
    planted: dict[str, Any] = field(default_factory=dict)
    made: list[LLM] = field(default_factory=list)
    told: list[tuple[str, int, int]] = field(default_factory=list)

    def __call__(self, model: str | Path = LLAMA, **options: Any) -> LLM:
        with progress_to(lambda *report: self.told.append(report)):
            self.made.append(
                self.make(
                    model,
                    warm="auto",
                    tensor_parallel=2,
                    rank_timeout=60,
                    policy=self.policy,
                    **{**LIMITS, **options},
                )
            )
        return self.made[-1]

    def verified(self) -> list[tuple[int, str, str, str, str]]:
        """(process, phase, operation, kernel, problem) of each verification since the last call."""
        lines = self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [tuple(json.loads(line)) for line in lines]


@pytest.fixture
def start(
    make: Callable[..., LLM], policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    planted = {
        "log": str(tmp_path / "log"),
        "fault": "",
        "kernels": [],
        "ahead": True,
        "slow": True,
    }
    made = Start(make, replace(policy, cache=str(tmp_path / "cache")), tmp_path / "log", planted)
    spawn = rank_processes.spawn

    def spawn_planted(module: str, rank: int, descriptors: tuple[int, ...]) -> Any:
        assert module == "gristmill.runtime.parallel.rank"
        return spawn(planted_rank.MODULE, rank, descriptors, {planted_rank.ENVIRONMENT: json.dumps(planted)})

    monkeypatch.setattr(rank_processes, "spawn", spawn_planted)
    yield made
    for llm in made.made:
        llm.close()


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(False, id="ahead"),
        pytest.param(True, id="planted: nothing ahead", marks=pytest.mark.slow),
    ],
)
def test_kernels_are_verified_once_beside_loading(start: Start, planted: bool) -> None:
    """For all ranks, by the first. Later only what the norms call, of which a layer does not know which."""
    start.planted["ahead"] = not planted
    llm = start()
    first = start.verified()
    assert len({process for process, *_ in first}) == 1, "one rank verifies"
    assert len({tuple(task) for _, _, *task in first}) == len(first) > 50, "nothing twice"
    assert {"linear", "paged_attention", "sample"} | TOGETHER <= {op for _, _, op, *_ in first}
    late = {op for _, phase, op, *_ in first if phase != "load"}
    assert (late <= {*UNCERTAIN}) != planted
    assert llm.engine.warmed is not None
    assert llm.engine.warmed.verified == len(first) or planted
    phases = [phase for phase, *_ in start.told]
    assert list(dict.fromkeys(phases)) == ["weights", "selection", "verification", "compilation"]
    assert max(done for phase, done, _ in start.told if phase == "weights") > 1
    llm.close()
    start.told.clear()
    again = start()
    assert start.verified() == [] and again.engine.warmed is not None and again.engine.warmed.verified == 0


def test_parts_of_other_sizes_are_verified_beside_loading(start: Start, tmp_path: Path) -> None:
    """Five blocks of 128 columns are three and two: rank 1 tells of its layers, which rank 0 does not have."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((MODELS / LLAMA / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 640}), encoding="utf-8")
    weights = load_file(MODELS / LLAMA / "model.safetensors")
    for name, tensor in weights.items():
        if "mlp" in name:
            weights[name] = (tensor[:, :640] if "down" in name else tensor[:640]).contiguous()
    save_file(weights, folder / "model.safetensors")
    start(folder)
    found = start.verified()
    of_ranks = {
        size for size in ("n=768,", "n=512,", "k=384,", "k=256,") for *_, task in found if size in task
    }
    assert of_ranks == {"n=768,", "n=512,", "k=384,", "k=256,"}
    assert {op for _, phase, op, *_ in found if phase != "load"} <= {*UNCERTAIN}
    assert len({tuple(task) for _, _, *task in found}) == len(found), "nothing twice"


@pytest.mark.parametrize("fault", [pytest.param("dies", marks=pytest.mark.slow), "fails"])
def test_a_kernel_that_fails_is_left_by_all_ranks(fault: str, start: Start, make: Callable[..., LLM]) -> None:
    """As on one device: the next one runs; without one, the error lists them."""
    start.planted.update(slow=False, fault=fault, kernels=["linear_cpu"])
    llm = start()
    rows = {row["kernel"] for row in llm.explain() if row["op"] == "linear"}
    assert rows and "linear_cpu" not in rows
    prompt = oracle.prompts()[5]
    params = SamplingParams(max_tokens=8)
    assert llm.generate([prompt], params)[0].token_ids == make(LLAMA).generate([prompt], params)[0].token_ids
    llm.close()
    start.planted.update(kernels=["sample_"])
    start.policy = replace(start.policy, cache=f"{start.policy.cache}-empty")
    with pytest.raises(
        NoKernelError, match=r"(?s)no kernel for sample .* quarantined: (planted|killed its process)"
    ):
        start()
