"""Tests inside the real SGLang, in its own environment: ``$(bash ci/host_env.sh sglang python) -m pytest tests/integrations/sglang``.

SGLang's wheel for CPUs is not published: `sgl_kernel` there is compiled for CUDA, and so is torchvision. Both are replaced by modules whose
names may be imported and not used. Everything that runs is SGLang's own Python: arguments, loader, Llama, pools, scheduling of a batch.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import tomllib
import types
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.kept import beside

ROOT = Path(__file__).parents[3]
MODELS = ROOT / "examples" / "models"
CACHE = beside("sglang")
ABSENT = (
    "sgl_kernel",
    "sgl_kernel.kvcacheio",
    "torchvision",
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
)


def installed() -> bool:
    """Whether this is the environment with SGLang."""
    try:
        return bool(version("sglang"))
    except PackageNotFoundError:
        return False


collect_ignore_glob = [] if installed() else ["test_[!i]*.py"]  # test_installed.py says so


class Absent(types.ModuleType):
    """A module that this machine lacks: any name of it is a class that cannot be used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: Any, **__: Any) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} is not on this machine")

        return type(name, (), {"__new__": refuse})


if installed():
    from transformers.utils import is_torchvision_available

    assert not is_torchvision_available()  # transformers remembers it
    for absent in ABSENT:
        module = Absent(absent)
        module.__spec__ = importlib.machinery.ModuleSpec(absent, None)
        module.__path__ = []
        sys.modules[absent] = module
    os.environ.update(
        HF_HUB_OFFLINE="1", SGLANG_USE_CPU_ENGINE="1", SGLANG_CPU_OMP_THREADS_BIND="0", OMP_NUM_THREADS="1"
    )


@pytest.fixture(scope="session", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """gristmill is installed with its entry points; kernels that were verified stay with the environment."""
    site = tmp_path_factory.mktemp("site")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = site / "gristmill-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gristmill\nVersion: 0.1.0\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    policy = site / "policy.toml"
    policy.write_text(f'cache = "{CACHE / "gristmill"}"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRISTMILL_POLICY", str(policy))
        patch.syspath_prepend(str(site))
        yield
