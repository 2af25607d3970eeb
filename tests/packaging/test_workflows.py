"""Workflows of CI: least permissions, pinned actions, and commands that exist in this tree."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def missing(command: str) -> list[str]:
    """What a command line names that this tree does not have: targets of make, scripts, configuration files."""
    lines = []
    for line in command.splitlines():
        words = shlex.split(re.sub(r"\$\{\{.*?\}\}", "X", line))
        if words[:1] == ["make"]:
            targets = [word for word in words[1:] if "=" not in word]
            lines += [f"make {target}" for target in targets if target not in TARGETS]
        scripts = [
            word.replace("{project}/", "")
            for word in words
            if re.fullmatch(r"[\w{}./-]+\.(py|sh|toml)", word)
        ]
        lines += [script for script in scripts if not (ROOT / script).is_file()]
    return lines


def problems(workflow: dict[Any, Any]) -> list[str]:
    """What is wrong with a workflow, a line each."""
    lines = []
    if workflow.get("permissions") != {"contents": "read"}:
        lines.append("permissions: expected contents: read and no more")
    if "group" not in workflow.get("concurrency", {}):
        lines.append("no concurrency group")
    if "pull_request_target" in workflow[True]:  # YAML 1.1 reads the key `on` so
        lines.append("pull_request_target runs the code of strangers with our token")
    for name, job in workflow["jobs"].items():
        if "timeout-minutes" not in job:
            lines.append(f"{name}: no timeout-minutes")
        if "latest" in job["runs-on"]:
            lines.append(f"{name}: runs on {job['runs-on']}; name its version")
        if "permissions" in job:
            lines.append(f"{name}: permissions of its own")
    for step in steps(workflow):
        if "uses" in step and not re.fullmatch(r"[\w-]+/[\w.-]+@v\d+(\.\d+)*", step["uses"]):
            lines.append(f"{step['uses']}: pin it by version")
        if step.get("uses", "").startswith("actions/checkout@") and step["with"]["persist-credentials"]:
            lines.append("checkout leaves its token in the working tree")
        if "github.event." in step.get("run", ""):
            lines.append(f"text of an event in a command: {step['run']}")
        lines += [f"not in this tree: {name}" for name in missing(step.get("run", ""))]
        config = step.get("with", {}).get("config-file")
        if config and not (ROOT / config).is_file():
            lines.append(f"not in this tree: {config}")
    return lines


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_in_order(path: Path) -> None:
    assert problems(yaml.safe_load(path.read_text(encoding="utf-8"))) == []


def test_tests_wheels_and_documents_have_a_workflow() -> None:
    commands = {
        path.name: [step.get("run", "") for step in steps(yaml.safe_load(path.read_text()))]
        for path in WORKFLOWS
    }
    assert any("make test" in command for command in commands["ci.yml"])
    assert any("ci/check_wheel.py" in command for command in commands["wheels.yml"])
    docs = yaml.safe_load((ROOT / ".github" / "workflows" / "docs.yml").read_text())
    assert any("lychee-action" in step["uses"] for step in steps(docs))
    ci = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert ci["jobs"]["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.13"]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("contents: read", "contents: write", "permissions: expected"),
        ("make test PYTHON", "make tests PYTHON", "not in this tree: make tests"),
        ("actions/setup-python@v6", "actions/setup-python@main", "pin it by version"),
        ("ubuntu-24.04", "ubuntu-latest", "name its version"),
        ("timeout-minutes: 90", "name: a", "no timeout-minutes"),
        ("pull_request:", "pull_request_target:", "pull_request_target"),
        ("persist-credentials: false", "persist-credentials: true", "leaves its token"),
        ("make test PYTHON", "python ci/absent.py #", "not in this tree: ci/absent.py"),
        ("make test PYTHON", "echo ${{ github.event.pull_request.title }} #", "text of an event"),
    ],
)
def test_a_fault_is_seen(old: str, new: str, complaint: str) -> None:
    """Planted faults in the workflow of the tests."""
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert old in text
    lines = problems(yaml.safe_load(text.replace(old, new)))
    assert any(complaint in line for line in lines), lines


def test_cibuildwheel_builds_one_wheel_per_architecture_with_cuda() -> None:
    config = tomllib.loads((ROOT / "ci" / "cibuildwheel.toml").read_text(encoding="utf-8"))["tool"][
        "cibuildwheel"
    ]
    linux = config["linux"]
    assert missing(linux["before-all"]) == [] and linux["environment"]["GRISTMILL_CUDA"] == "on"
    version = linux["before-all"].rpartition(" ")[2].replace("-", ".")
    assert linux["environment"]["CUDA_HOME"] == f"/usr/local/cuda-{version}"
    assert "--exclude libtorch_cpu.so" in linux["repair-wheel-command"]
    runners = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())["jobs"]["wheel"]
    assert {entry["arch"] for entry in runners["strategy"]["matrix"]["include"]} == {
        name.removeprefix("manylinux-").removesuffix("-image") for name in linux if name.endswith("-image")
    }
