"""lab.warm_models: what engines ask for is verified here, and written in the form that is shipped."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.store import Store
from lab.warm_models import main

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "docs-llama"


def test_a_model_that_fails_does_not_keep_the_others_from_it(tmp_path: Path, policy_file) -> None:
    """Every size of a layer is in the file, in the number format that was asked for; the store of the user has nothing of it."""
    policy_file()
    out = tmp_path / "verified.json"
    command = ["--models", f"no_such_model,{MODEL}:int4_g32", "--device", "cpu", "--memory", "20000000"]
    result = CliRunner().invoke(main, [*command, "--out", str(out)])
    assert result.exit_code == 1 and result.output.endswith("not warmed: no_such_model\n")
    records = Store.read(out).verifications.values()
    sizes = {one.problem for one in records if one.op == "linear" and "w=int4_g32" in one.problem}
    assert all(one.ok for one in records) and len({text.partition(",")[0] for text in sizes}) > 10
    assert not Store.read(Policy.current().store_path).verifications
