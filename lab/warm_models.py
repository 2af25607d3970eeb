"""Verifications to ship: what engines of common models ask for, each verified on this device.

    python -m lab.warm_models --models qwen3-0.6b,llama3-8b:int4_g128 --out verified.json
    kernelbench store merge --into autotune/tuned/h200_verified.json verified.json

A model is a directory, or a shape of `lab.engine` of which two layers are made; a colon and a number format after it quantize its weights.
`gristmill warm` loads each over one store, which is empty at first, and verifies every problem, also those whose verifications have come with
gristmill. `kernelbench store ship` writes what the store has then.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import torch

from lab.engine import SHAPES, random_model

LAYERS = 2
"""All layers of a model ask for the same kernels; a mixture of experts with dense layers has one of each."""


def warm(model: Path, scheme: str, options: list[str], env: dict[str, str]) -> bool:
    """Whether `gristmill warm` ended well."""
    command = [sys.executable, "-m", "gristmill.tools.cli", "warm", "--model", str(model), *options]
    return not subprocess.run([*command, *(["--quant", scheme] if scheme else [])], env=env).returncode


@click.command()
@click.option("--models", required=True, help=f"MODEL[:FORMAT],...: directories, or of {', '.join(SHAPES)}.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--memory", type=int, default=2 * 10**9, show_default=True, help="Bytes of an engine's cache.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Where the verifications go.")
def main(models: str, device: str, memory: int, out: Path) -> None:
    """Verify what engines of models ask for, and write the records that can be shipped. A model that fails does not keep the others from it."""
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        policy = Path(scratch) / "policy.toml"
        policy.write_text(f'canary = false\nstore = "{scratch}/store.json"\n')
        env = os.environ | {"GRISTMILL_POLICY": str(policy)}
        made: dict[str, Path] = {}
        for text in models.split(","):
            name, _, scheme = text.partition(":")
            if name in SHAPES and name not in made:
                made[name] = random_model(name, Path(scratch), num_hidden_layers=LAYERS)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            options = ["--device", device, "--memory", str(memory)]
            if not warm(made.get(name, Path(name)), scheme, options, env):
                failed.append(text)
        out.parent.mkdir(parents=True, exist_ok=True)
        ship = [sys.executable, "-m", "gristmill.bench.cli", "store", "ship", str(out)]
        subprocess.run(ship, env=env, check=True)
    if failed:
        raise SystemExit(f"not warmed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
