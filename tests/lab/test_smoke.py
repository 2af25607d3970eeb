"""Every program of lab/ runs in its smallest form. Programs are discovered in the folder: a new one without a
form here fails."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gristmill.kernel_registry.target import Target
from lab import (
    context_parallel,
    first_token,
    gguf_model,
    gpu_graphs,
    host_steps,
    kernel_timing,
    linear_a8,
    linear_dense,
    linear_sanitized,
    linear_w8a8,
    linear_weight_only,
    loading_cases,
    loading_memory,
    mla_attention,
    moe,
    paged_attention,
    sampling,
    varlen_attention,
)
from tests import forked
from tests.lab.test_gemm_ws_costs import KEY, TRUE, times
from tests.lab.test_linear_weight_only import Calls
from tests.lab.test_loading import SMALL as SMALL_LAYERS
from tests.lab.test_loading_memory import SMALL as SMALL_MODELS
from tests.lab.test_vllm_linear import LINE, planted

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path.stem for path in (ROOT / "lab").glob("*.py") if path.stem != "__init__")
PROGRAMS = [name for name in MODULES if '__name__ == "__main__"' in (ROOT / "lab" / f"{name}.py").read_text()]


def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the programs for GPUs on the CPU: calls instead of graphs."""
    for module in (
        gpu_graphs,
        linear_weight_only,
        linear_dense,
        linear_w8a8,
        linear_sanitized,
        mla_attention,
        moe,
        paged_attention,
        sampling,
        varlen_attention,
    ):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(kernel_timing, "Graphs", Calls)
    monkeypatch.setattr(kernel_timing, "environment", dict)
    monkeypatch.setattr(gpu_graphs, "COLD", 1 << 18)
    for module in (linear_dense, linear_weight_only, linear_w8a8):
        monkeypatch.setattr(module, "Graphs", Calls)
    monkeypatch.setattr(linear_sanitized, "device_target", lambda device, policy: Target.parse("h200"))
    monkeypatch.setattr(linear_sanitized, "run", lambda kernel, config, x, q, tensors: 0.0)


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the layers a few megabytes in size."""
    monkeypatch.setattr(loading_cases, "SHAPES", SMALL_LAYERS)
    monkeypatch.setattr(loading_memory, "KINDS", SMALL_MODELS)
    monkeypatch.setattr(loading_memory, "SCHEMES", {"dense": ("int4_g128",)})


def small_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes GGUF files of one layer and a short vocabulary."""
    pytest.importorskip("gguf")
    for name, size in {
        "HIDDEN": 256,
        "HEADS": 2,
        "KV_HEADS": 1,
        "FFN": 256,
        "VOCABULARY": 640,
        "MERGES": 300,
    }.items():
        monkeypatch.setattr(gguf_model, name, size)
    monkeypatch.setattr(first_token, "CASES", {"Q4_0": ("Q4_0", "BF16", 1)})


def short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The read bandwidth of a megabyte."""
    monkeypatch.setattr(linear_a8, "FLOOR_BYTES", 1 << 20)


def frozen_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tests.heap_is_frozen."""
    monkeypatch.setattr(host_steps, "freeze_heap", lambda owner: None)


def as_it_is(monkeypatch: pytest.MonkeyPatch) -> None: ...


MODEL, TOKENS = ROOT / "examples" / "models" / "docs-llama", ROOT / "examples" / "models" / "eval_tokens.u16"
FORMS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "attention_cpu": (as_it_is, "--cases smallest --rounds 1 --out OUT"),
    "context_parallel": (
        as_it_is,
        f"--model {MODEL} --device cpu --contexts 40 --batch 2 --tokens 2 --rounds 1 --out OUT",
    ),
    "cpu": (as_it_is, "--case rms_norm --rounds 3 --out OUT"),
    "cpu_models": (small_file, "--kinds Q8_0 --layers 1 --prompt 16 --rounds 1 --out OUT"),
    "cutedsl_programs": (as_it_is, "--groups linear_fp8,grouped_bf16,experts_bf16 --list --out OUT"),
    "embeddings": (
        as_it_is,
        "--sizes 300,64,1,2,96 --tokens 8,20 --texts 3 --batch 2 --rounds 1 --spread 0.5 --threads 1 --out OUT",
    ),
    "decode_graphs": (
        as_it_is,
        f"--model {MODEL} --device cpu --seqs 1,2 --contexts 20 --bounds 32,64 --out OUT",
    ),
    "engine": (
        as_it_is,
        f"--model {MODEL} --device cpu --requests 2 --lengths 4,8 --tokens 8 --rounds 1 --starts 2 --out OUT "
        '--limits {"max_seqs":2,"max_batch_tokens":16,"num_blocks":16}',
    ),
    "host_steps": (frozen_heap, f"--model {MODEL} --requests 11 --tokens 12 --rounds 1 --out OUT"),
    "launches": (as_it_is, f"--model {MODEL} --device cpu --tokens 3,20 --others 2 --steps 2 --out OUT"),
    "engine_turns": (
        as_it_is,
        f"--model {MODEL} --device cpu --engines gristmill --workloads single,mixed_special --rounds 1 --scale 0.02 --memory 20000000 "
        "--max-model-len 512 --out OUT",
    ),
    "first_token": (small_file, "--rounds 1 --quant-head int8 --out OUT"),
    "kv_caches": (
        as_it_is,
        "--device cpu --layers 1 --model qwen3-8b --tokens 32 --rounds 1 --out OUT",
    ),
    "kv_peer": (as_it_is, "--device cpu --tokens 3 --rounds 1 --out OUT"),
    "first_token_trees": (
        as_it_is,
        f"--tree now={ROOT} --model {MODEL} --checkpoint int4_g128 --device cpu --rounds 1 --out OUT --limits "
        '{"max_seqs":2,"max_batch_tokens":8,"max_model_len":64}',
    ),
    "gemm_ws_costs": (as_it_is, "--out OUT TIMES"),
    "gguf_decode": (small_file, "--model MODEL_FILE --tokens 4 --rounds 1 --check --out OUT"),
    "gguf_model": (small_file, "--kind Q4_K --layers 1 FILE"),
    "kv_transfer": (
        as_it_is,
        f"--model {MODEL} --layers 1 --tokens 32 --store host:64MiB --rounds 1 --out OUT",
    ),
    "linear_a8": (short_reads, "--shape 64x256 --scheme int4_g128 --m 2 --seconds 0 --out OUT"),
    "linear_dense": (
        on_a_cpu,
        "--shapes 64x96+silu_mul --m 2 --rounds 2 --kernels linear_torch --out OUT --store FILE",
    ),
    "linear_sanitized": (on_a_cpu, "--schemes nvfp4 --problems 7x200x2304"),
    "linear_w8a8": (
        on_a_cpu,
        "--shapes 96x256 --m 2 --rounds 2 --kernels linear_dequant_torch --out OUT --store FILE",
    ),
    "linear_weight_only": (
        on_a_cpu,
        "--schemes int4_g128 --shapes 96x256 --m 1 --rounds 2 --kernels linear_cpu --out OUT",
    ),
    "loading": (small, "--gigabytes 0.001 --rounds 1 --case gristmill --warm-only --out OUT"),
    "loading_memory": (small, "--gigabytes 0.001 --kind dense --out OUT"),
    "mla_attention": (
        on_a_cpu,
        "--cases smallest --kernels mla_attention_torch --rounds 2 --seconds 0 --out OUT",
    ),
    "moe": (
        on_a_cpu,
        "--cases smallest,smallest_clamped,smallest_w8a8 --kernels moe_chain_torch --rounds 2 --seconds 0 --out OUT",
    ),
    "paged_attention": (
        on_a_cpu,
        "--cases smallest --kernels paged_attention_torch --rounds 2 --seconds 0 --out OUT",
    ),
    "quality": (
        as_it_is,
        f"--models {MODEL} --tokens {TOKENS} --schemes int4_g128 --methods rtn --window 32 --windows 1 --out OUT",
    ),
    "sampling": (on_a_cpu, "--cases smallest --kernels sample_torch --rounds 2 --seconds 0 --out OUT"),
    "sanitized": (as_it_is, "--kernels rms_norm_cpu,silu_and_mul_torch --part 1/2 --target cpu --out OUT"),
    "sitting": (as_it_is, f"{ROOT / 'lab' / 'sittings' / 'hopper.toml'} --folder . --list"),
    "serve_front_end": (
        as_it_is,
        "--requests 20 --clients 2 --rounds 1 --streams 4 --stream-tokens 30 --seconds 0.5 --memory 20 --out OUT",
    ),
    "speculation": (
        as_it_is,
        f"--model {MODEL} --draft {MODEL} --tokens {TOKENS} --prompts 1 --prompt-tokens 16 --max-tokens 6 --counts 2 "
        "--temperatures 0 --out OUT",
    ),
    "varlen_attention": (
        on_a_cpu,
        "--cases smallest --kernels varlen_attention_torch --rounds 2 --seconds 0 --out OUT",
    ),
    "warm_models": (as_it_is, f"--models {MODEL} --device cpu --memory 20000000 --out FILE"),
    "vllm_linear": (planted, f"--model {MODEL} {LINE} --turns 1 --out OUT"),
}
"""Per program, replacements for what a test cannot have, and its command line; OUT is a result file, MODEL_FILE a small GGUF file, TIMES
a file of times of gemm_ws, FILE any other that the program writes."""

SLOW = (
    "context_parallel",
    "cpu_models",
    "engine",
    "engine_turns",
    "first_token",
    "first_token_trees",
    "warm_models",
)
"""Programs whose smallest form starts many processes: `make test-full` runs them."""


def test_every_program_has_a_smallest_form() -> None:
    assert FORMS.keys() == {*PROGRAMS}
    helpers = {*MODULES} - {*PROGRAMS}
    text = "".join((ROOT / "lab" / f"{name}.py").read_text() for name in MODULES)
    assert all(f"from lab.{name} import" in text for name in helpers), "a module that no program uses"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PROGRAMS]
)
def test_program_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_file) -> None:
    """Runs `main` as the command line does; a result file has rows and states how it was made."""
    policy_file()
    prepare, line = FORMS[name]
    prepare(monkeypatch)
    out = tmp_path / "out.json"
    if "MODEL_FILE" in line:
        made = gguf_model.write_model(
            tmp_path / "model.gguf", "Q4_K", 1, "Q8_0", gguf_model.VOCABULARY, gguf_model.MERGES
        )
        line = line.replace("MODEL_FILE", str(made))
    if "TIMES" in line:
        made = tmp_path / "times.json"
        made.write_text(json.dumps({"rows": times({KEY: TRUE})}))
        line = line.replace("TIMES", str(made))
    monkeypatch.setattr(
        sys, "argv", [name, *line.replace("OUT", str(out)).replace("FILE", str(tmp_path / "file")).split()]
    )
    threads = torch.get_num_threads()
    try:
        status = importlib.import_module(f"lab.{name}").main()
    except SystemExit as end:
        status = end.code
    finally:
        torch.set_num_threads(threads)
    assert not status
    if "FILE" in line:
        assert (tmp_path / "file").stat().st_size
    if "OUT" in line:
        data = json.loads(out.read_text())
        assert data["rows"]
        command = (
            data.get("about", {}).get("command") or data.get("command", "") or data["runs"][0]["command"]
        )
        assert f"lab.{name}" in command


def test_a_program_for_ranks_on_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_file
) -> None:
    """`context_parallel` without processes of ranks, which take most of its time."""
    policy_file()
    monkeypatch.setattr(context_parallel, "LAYOUTS", {"one": {}})
    line = FORMS["context_parallel"][1].replace("OUT", str(tmp_path / "out.json"))
    monkeypatch.setattr(sys, "argv", ["context_parallel", *line.split()])
    with pytest.raises(SystemExit) as end:
        context_parallel.main()
    assert not end.value.code
    [row] = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["layout"] == "one" and row["context"] == 40 and row["prompts_s"] > 0
    # A step of two is a difference of times here, which may be less than their noise.
    assert len(row["step_samples_s"]) == 1


def test_programs_start_from_the_checkout() -> None:
    """Runs ``python -m lab.NAME --help`` for all programs in one process."""
    code = (
        "import contextlib, runpy, sys\n"
        f"for name in {PROGRAMS!r}:\n"
        "    sys.argv = [name, '--help']\n"
        "    try: runpy.run_module(f'lab.{name}', run_name='__main__')\n"
        "    except SystemExit as end: assert not end.code, name\n"
    )
    process = forked.run("-c", code, cwd=ROOT, path=(ROOT,))
    assert process.returncode == 0, process.stderr
    assert process.stdout.lower().count("usage: ") == len(PROGRAMS)


def test_the_package_imports_nothing_of_the_lab() -> None:
    """The import contract `layers` says the same; this test does not need import-linter."""
    for folder in (
        "kernel_registry",
        "quant",
        "kernels",
        "autotune",
        "runtime",
        "serve",
        "tools",
        "bench",
        "src/gristmill",
    ):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert "from lab" not in text and "import lab" not in text, path


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("source", sorted((ROOT / "lab").glob("*.cu")), ids=lambda path: path.name)
def test_cuda_programs_compile(source: Path, tmp_path: Path) -> None:
    process = subprocess.run(
        ["nvcc", "-arch=sm_90a", "-cubin", "-o", tmp_path / "out.cubin", source],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
