"""The runner of kernels beside peers, on a CPU: gristmill's own kernels, and peers that are planted."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.op import Cost
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store
from gristmill.kernel_registry.target import Target
from lab.peers import __main__ as module
from lab.peers import group as group_module
from lab.peers import merge, ours, page, race
from lab.peers.__main__ import main, read_path_files, thinned
from lab.peers.adapter import Adapter, Arguments, Peer, Run, peers
from lab.peers.group import Cell, groups
from lab.peers.libraries import cublas
from lab.peers.race import LostDeviceError, against_best_peer, calls_of
from lab.peers.result import summary

GROUPS = groups()


def planted(name: str, change: Callable[[torch.Tensor], torch.Tensor], **more: Any) -> Peer:
    """A peer for `linear` whose result is torch's, changed."""

    def bind(problem: Problem, arguments: Arguments) -> Run:
        product = cublas.bind(problem, arguments)
        return lambda: change(product())

    fields = {"accepts": cublas.accepts, "pack": cublas.pack, "bind": bind} | more
    return Peer(name=name, package="torch", modules=("torch",), adapters=(Adapter(op="linear", **fields),))


def fails(problem: Problem, arguments: Arguments) -> Run:
    raise RuntimeError("has no kernel for it")


PLANTED = {
    "right": planted("right", lambda y: y),
    "wrong": planted("wrong", lambda y: y * 1.1),
    "failing": planted("failing", lambda y: y, bind=fails),
    "refusing": planted("refusing", lambda y: y, accepts=lambda problem: "not today"),
    "absent": Peer(name="absent", package="absent", modules=("no_such.module",), adapters=()),
}


@pytest.fixture(autouse=True)
def _default_policy(policy_file) -> None:
    policy_file()


def run(out: Path | None, *options: str, known: dict[str, Peer] | None = None) -> int:
    where = [] if out is None else ["--out", str(out)]
    return main(["--dry", "--groups", "linear_dense", *where, *options], PLANTED if known is None else known)


def read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def times(row: dict[str, Any]) -> dict[str, float]:
    """The medians by candidate."""
    return {name: us for name, us, *_ in row["candidates"]}


def test_right_results_are_timed_and_others_reported(tmp_path: Path, capsys) -> None:
    out = tmp_path / "peers.json"
    assert run(out, "--groups", "linear_dense,linear_int4") == 0
    data = read(out)
    assert data["libraries"]["absent"] == "no_such is not installed"
    assert data["libraries"]["right"].startswith("torch 2.")
    assert data["trying"] is None and "lab.peers --dry" in data["about"]["command"]
    assert [row["problem"] for row in data["rows"]] == [
        "m=1,n=96,k=128",
        "m=7,n=96,k=128",
        "m=1,n=96,k=256,w=int4_g128",
        "m=7,n=96,k=256,w=int4_g128",
    ]
    for row in data["rows"]:
        assert times(row).keys() == {row["kernel"], "right"}
        for _, us, low, high, error in row["candidates"]:
            assert 0 < low <= us <= high and error <= row["limit"]
        assert row["peer"] == "right" and row["ratio"] > 0 and row["code"]
        assert row["wrong"].keys() == {"wrong"} and "over the tolerance" in row["wrong"]["wrong"]
        assert row["refused"] == {"failing": "RuntimeError: has no kernel for it"}
    printed = capsys.readouterr()
    assert "| linear_int4 | 2 of 2 |" in printed.out
    assert "without absent: no_such is not installed" in printed.err
    assert "[4/4 " in printed.err and "wrong WRONG: error" in printed.err


def test_times_of_our_kernels_go_to_a_store(tmp_path: Path) -> None:
    """Those of the selected kernel, of the others and of every configuration, which selection reads; none of a peer."""
    out, store = tmp_path / "peers.json", tmp_path / "times.json"
    assert run(out, "--store", str(store), "--configurations", "linear_cpu") == 0
    expected: dict[tuple[str, str, str], list[float]] = {}
    for row in read(out)["rows"]:
        configs = {row["kernel"]: row["config"]} | row["configurations"]
        for name in times(row).keys() & configs.keys():
            key = row["problem"], name.partition("/")[0], json.dumps(configs[name], sort_keys=True)
            expected.setdefault(key, []).append(times(row)[name])
    found = {
        (t.problem, t.kernel, json.dumps(t.config, sort_keys=True)): t.us for t in Store.read(store).timings
    }
    assert found.keys() == expected.keys() and len(found) >= 2
    for key, us in found.items():
        assert min(abs(us - one) for one in expected[key]) <= 1e-3 * us + 1e-3


def test_a_store_keeps_the_times_of_cells_before(tmp_path: Path, capsys) -> None:
    """A run that goes on adds those of its own cells; a cell that is measured again has its new time."""
    out, store = tmp_path / "peers.json", tmp_path / "times.json"

    def by_problem() -> dict[str, float]:
        return {t.problem: t.us for t in Store.read(store).timings if t.kernel == "linear_cpu"}

    assert run(out, "--store", str(store), "--cells", "1", known={}) == 0
    [first] = by_problem()
    store.write_text(store.read_text().replace('"us": ', '"us": 9'))
    before = by_problem()
    assert run(out, "--store", str(store), known={}) == 0
    assert by_problem().keys() > {first} and by_problem()[first] == before[first]
    assert run(None, "--store", str(store), known={}) == 0
    assert by_problem()[first] < before[first]
    store.write_text("{")
    assert run(out, "--store", str(store), known={}) == 2
    assert f"{store}: line 1" in capsys.readouterr().err and store.read_text() == "{"


def test_every_configuration_of_a_kernel_is_a_candidate(tmp_path: Path, capsys) -> None:
    """Those of kernels of other operations, or for other devices, are left out."""
    names = "linear_cpu,linear_dense_decode_sm90,moe_cpu"
    assert run(tmp_path / "peers.json", "--configurations", names, known={}) == 0
    for row in read(tmp_path / "peers.json")["rows"]:
        assert [*row["configurations"]] == ["linear_cpu/0"]
        assert times(row)["linear_cpu/0"] > 0 and row["configurations"]["linear_cpu/0"]["level"]
    with pytest.raises(SystemExit):
        run(None, "--configurations", "no_such_kernel")
    assert "no kernels no_such_kernel" in capsys.readouterr().err


@pytest.mark.parametrize("name", GROUPS)
def test_every_group_runs(name: str, tmp_path: Path) -> None:
    assert run(tmp_path / "peers.json", "--groups", name, known={}) == 0
    for row in read(tmp_path / "peers.json")["rows"]:
        assert times(row)[row["kernel"]] > 0, row
        assert row["ratio"] is None and not row["wrong"]


def test_a_wrong_kernel_of_ours_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "load", lambda kernel: lambda config, call: call.out.zero_())
    assert run(tmp_path / "peers.json") == 0
    for row in read(tmp_path / "peers.json")["rows"]:
        assert row["kernel"] in row["wrong"] and [*times(row)] == ["right"] and row["ratio"] is None


def test_what_writes_nothing_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that had right results is not free again before all candidates are checked."""
    monkeypatch.setattr(ours, "load", lambda kernel: lambda config, call: None)
    nothing = planted("nothing", torch.empty_like)
    assert run(tmp_path / "peers.json", known={"right": PLANTED["right"], "nothing": nothing}) == 0
    for row in read(tmp_path / "peers.json")["rows"]:
        assert row["wrong"].keys() == {row["kernel"], "nothing"}


def test_a_run_goes_on_where_one_ended(tmp_path: Path, capsys) -> None:
    out = tmp_path / "peers.json"
    assert run(out, "--cells", "1") == 0
    [first] = read(out)["rows"]
    assert run(out, "--seconds", "0") == 0
    assert read(out)["rows"] == [first] and "1 cells are left" in capsys.readouterr().err
    assert run(out) == 0
    assert read(out)["rows"][0] == first and len(read(out)["rows"]) == 2


def test_files_of_several_runs_become_one(tmp_path: Path) -> None:
    """Of a cell the last row that compares something counts, and each row says which run it is of."""
    first, second, out = (tmp_path / f"{name}.json" for name in ("first", "second", "merged"))
    assert run(first) == 0
    assert run(second, "--where", "m=7,") == 0
    data = read(second)
    lost = read(first)["rows"][0] | {"ratio": None, "peer": None, "candidates": []}
    second.write_text(json.dumps(data | {"rows": [*data["rows"], lost]}))
    result = CliRunner().invoke(merge.main, [str(first), str(second), "--out", str(out)])
    assert result.exit_code == 0, result.output
    together = read(out)
    assert [(row["problem"], row.get("run", 0)) for row in together["rows"]] == [
        ("m=1,n=96,k=128", 0),
        ("m=7,n=96,k=128", 1),
    ]
    assert together["rows"][0] == read(first)["rows"][0]
    assert together["rows"][1] == data["rows"][0] | {"run": 1}
    assert [("--where" in one["command"]) for one in together["runs"]] == [False, True]
    assert together["summary"][0]["compared"] == 2
    shown = tmp_path / "bench" / "results" / "h200" / "peers.json"
    shown.parent.mkdir(parents=True)
    out.rename(shown)
    assert all(f"`{one['command']}`" in page.results(tmp_path) for one in together["runs"])
    again = merge.merged([together, read(first)])  # whose rows now replace all
    assert len(again["runs"]) == 1 and not any("run" in row for row in again["rows"])


def test_runs_of_other_versions_are_not_merged(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert run(first) == 0
    data = read(first)
    second.write_text(json.dumps(data | {"about": data["about"] | {"torch": "1.0"}}))
    result = CliRunner().invoke(merge.main, [str(second), str(first), "--out", str(tmp_path / "out.json")])
    assert result.exit_code == 2 and "torch 1.0" in result.output and not (tmp_path / "out.json").exists()


def test_cells_are_chosen_by_what_they_are_called(tmp_path: Path) -> None:
    texts = "m=7,n=96,k=256|m=4095,"
    assert run(tmp_path / "peers.json", "--groups", "linear_dense,linear_int4", "--where", texts) == 0
    [row] = read(tmp_path / "peers.json")["rows"]
    assert row["problem"] == "m=7,n=96,k=256,w=int4_g128"


def test_json_alone_on_stdout(tmp_path: Path, capsys) -> None:
    def loud(y: torch.Tensor) -> torch.Tensor:
        print("INFO: a library greets")
        return y

    out = tmp_path / "peers.json"
    assert run(out, "--json", "--cells", "1", known={"loud": planted("loud", loud)}) == 0
    printed = capsys.readouterr()
    assert "a library greets" in printed.err
    assert json.loads(printed.out)["summary"] == read(out)["summary"]


def test_the_cell_that_killed_a_process_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "peers.json"
    with monkeypatch.context() as during:
        during.setattr(race.Race, "row", killed)
        with pytest.raises(KeyboardInterrupt):
            run(out)
    assert read(out)["rows"] == [] and read(out)["trying"]["problem"] == "m=1,n=96,k=128"
    assert run(out) == 0
    ended, measured = read(out)["rows"]
    assert ended["refused"] == {"all": "the process ended while it measured this cell"}
    assert measured["ratio"] > 0 and not ended["candidates"]
    assert run(out, "--retry") == 0
    assert all(row["ratio"] > 0 for row in read(out)["rows"]) and len(read(out)["rows"]) == 2


def test_a_lost_device_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def lost(device: str) -> None:
        raise LostDeviceError("an illegal memory access was encountered")

    out = tmp_path / "peers.json"
    with monkeypatch.context() as during:
        during.setattr(race, "_still_usable", lost)
        assert run(out) == 3
    assert "goes on with the next cell" in capsys.readouterr().err
    assert "left the device unusable: an illegal" in read(out)["rows"][0]["refused"]["all"]
    assert run(out) == 0 and len(read(out)["rows"]) == 2


def test_a_cell_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def first_fails(op: Any, arguments: Arguments) -> Any:
        if len(arguments[0]) == 1:
            raise MemoryError("no room for one row")
        return run_reference(op, arguments)

    run_reference = race.run_reference
    monkeypatch.setattr(race, "run_reference", first_fails)
    assert run(tmp_path / "peers.json") == 1
    failed, measured = read(tmp_path / "peers.json")["rows"]
    assert failed["refused"] == {"all": "MemoryError: no room for one row"} and measured["ratio"] > 0
    assert "Traceback" in capsys.readouterr().err


def test_what_is_wrong_later_has_no_time(tmp_path: Path) -> None:
    """Planted fault: a peer whose first calls are right."""

    def bind(problem: Problem, arguments: Arguments) -> Run:
        product, calls = cublas.bind(problem, arguments), iter(range(10**6))
        return lambda: product() * (1.0 if next(calls) < 2 else 1.1)

    late = planted("late", lambda y: y, bind=bind)
    assert run(tmp_path / "peers.json", known={"late": late, "right": PLANTED["right"]}) == 0
    for row in read(tmp_path / "peers.json")["rows"]:
        assert row["wrong"].keys() == {"late"} and row["wrong"]["late"].endswith("after it was timed")
        assert "late" not in times(row) and row["peer"] == "right"


@pytest.mark.parametrize(("part", "stands"), [(1.0, ""), (1.5, "inexact"), (1.51, "wrong")])
def test_a_peer_may_be_a_little_inexact(
    part: float, stands: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """It is compared, and the row and the table say so; our kernel with such an error has no time."""
    group = GROUPS["linear_dense"]

    def error(op: object, problem: Problem, *_: object) -> float:
        return part * group.limit_of(problem)

    monkeypatch.setattr(module, "groups", lambda: {group.name: replace(group, error=error)})
    right, out = {"right": PLANTED["right"]}, tmp_path / "peers.json"
    assert run(out, known=right) == 0
    printed = capsys.readouterr()
    for row in read(out)["rows"]:
        assert (row["peer"] == "right") is (stands != "wrong") is ("right" in times(row))
        for key in ("inexact", "wrong"):
            found = row.get(key, {})
            assert found.keys() == ({"right"} if key == stands else set())
            assert all("is over the tolerance" in why for why in found.values())
    assert (
        "Timed with errors of up to 1.5 times the tolerance: right in 2 of linear_dense." in printed.out
    ) is (stands == "inexact")
    assert ("right inexact: error" in printed.err) is (stands == "inexact")
    monkeypatch.setattr(race, "error_of", error)
    assert run(tmp_path / "ours.json", known=right) == 0
    for row in read(tmp_path / "ours.json")["rows"]:
        assert (row["kernel"] in row["wrong"]) is (part > 1.0)


def test_help(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        run(None, "--help")
    assert not end.value.code and "attention_decode" in capsys.readouterr().out


def test_rows_of_other_versions_stay_apart(tmp_path: Path, capsys) -> None:
    out = tmp_path / "peers.json"
    assert run(out, "--cells", "1") == 0
    before = out.read_text()
    out.write_text(before.replace('"torch":"', '"torch":"1.'))
    assert run(out) == 2 and "rows of another run, with torch 1." in capsys.readouterr().err
    out.write_text(before)
    assert run(out, known={"right": PLANTED["right"]}) == 2
    assert "libraries" in capsys.readouterr().err


def test_ratios_are_of_equal_rounds() -> None:
    """The clock falls between the rounds: the ratio of the medians would be 0.5."""
    samples = {"a": [1.0, 1.0, 2.0], "slow": [9.0, 9.0, 9.0], "p": [1.0, 2.0, 4.0], "other": [0.1] * 3}
    assert against_best_peer(samples, "a", {"a", "other"}) == {"peer": "p", "ratio": 0.5}
    assert against_best_peer(samples, "b", {"a", "other"})["ratio"] is None
    assert against_best_peer({"a": [1.0]}, "a", {"a"}) == {"peer": None, "ratio": None}


def test_the_figures_of_a_group() -> None:
    def row(ratio: float | None, **wrong: str) -> dict[str, Any]:
        about = {"model": "M", "problem": f"m={ratio}", "kernel": "k", "peer": "p"}
        return {**about, "ratio": ratio, "wrong": wrong}

    found = summary("g", [row(0.5), row(2.0), row(1.05), row(None, fa3="error")])
    assert found["cells"] == 4 and found["compared"] == 3 and found["wrong"] == 1
    assert found["mean_ratio"] == pytest.approx(math.cbrt(0.5 * 2.0 * 1.05)) and found["close"] == 2 / 3
    worst = {"model": "M", "problem": "m=2.0", "ratio": 2.0, "kernel": "k", "peer": "p"}
    assert found["worst"] == worst
    assert summary("g", [row(None)])["mean_ratio"] is None
    table = page.table({"summary": [found, summary("h", [row(None)])]}).splitlines()
    assert table[2] == "| g | 3 of 4 | 1.02 | 67% | 2.00: M, `m=2.0`, `k` over p | 1 |"
    assert table[3] == "| h | 0 of 1 | - | - | - | 0 |"


def test_calls_of_a_graph() -> None:
    assert calls_of(Cost(bytes=400_000_000, flops=0), 3) == 40  # 100 µs each
    assert calls_of(Cost(bytes=0, flops=7 * 10**12), 3) == 3
    assert calls_of(Cost(bytes=1, flops=1), 64) == 400
    cells = [Cell("g", "m", str(number)) for number in range(10)]
    assert [cell.problem for cell in thinned(cells, 3)] == ["0", "3", "6"] and thinned(cells, None) == cells


def test_without_a_result_file_there_are_no_numbers(tmp_path: Path) -> None:
    assert page.results(tmp_path) == "Not measured yet: there is no result file."
    out = tmp_path / "bench" / "results" / "h200" / "peers.json"
    assert run(out, "--cells", "1") == 0
    text = page.results(tmp_path)
    total = len(list(GROUPS["linear_dense"].cells))
    assert f"| linear_dense | 1 of {total} |" in text and "Not measured there: attention_decode" in text
    assert "(../../bench/results/h200/peers.json)" in text
    assert "absent: no_such is not installed" in text and "lab.peers --dry" in text


def test_the_problems() -> None:
    """Not too many for one call of a device, each of them once, and each with a peer and a kernel of ours for Hopper."""
    cells = [cell for group in GROUPS.values() for cell in group.cells]
    assert len(cells) <= 300 and len({cell.name for cell in cells}) == len(cells)
    models = {cell.model.partition(" TP")[0].partition(" EP")[0] for cell in cells}
    names = [
        "Llama-3-8B",
        "Llama-3-70B",
        "Qwen3-0.6B",
        "Qwen3-8B",
        "Qwen3-30B-A3B",
        "gpt-oss-20b",
        "DeepSeek-V3",
    ]
    assert models >= {*names, "Mixtral 8x7B", "Gemma 3 12B"}
    registry, hopper, build = default_registry(), Target.parse("h200"), Build.probe()
    for cell in cells:
        problem, op = GROUPS[cell.group].problem(cell), GROUPS[cell.group].op
        assert not problem.open_axes
        adapters = [adapter for peer in peers().values() for adapter in peer.of(op).values()]
        assert any(adapter.accepts(problem) is None for adapter in adapters), cell
        kernels = [k for k in registry.kernels_of(op) if k.language in ("cuda", "triton")]
        fit = [k for k in kernels if not k.requires.check_hardware(hopper, build)]
        assert any(kernel.accepts(problem) is None for kernel in fit), cell


def test_a_file_adds_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lab.peers import groups as package

    text = "from dataclasses import replace\nfrom lab.peers.groups.norms import GROUPS as norms\n"
    (tmp_path / "extra.py").write_text(text + "GROUPS = (replace(norms[0], name='extra'),)\n")
    (tmp_path / "_helper.py").write_text("raise AssertionError\n")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    found = group_module.groups()
    monkeypatch.delitem(sys.modules, "lab.peers.groups.extra")
    assert found.keys() == {*GROUPS, "extra"}


@pytest.mark.parametrize(("option", "text"), [("--groups", "nothing"), ("--peers", "nobody")])
def test_unknown_names(option: str, text: str, capsys) -> None:
    with pytest.raises(SystemExit):
        run(None, option, text)
    assert f"no {option[2:]} {text}; there are" in capsys.readouterr().err


def test_needed_peers_that_cannot_run_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Also those that are there and fail when they are imported, which the others are not until a cell needs them."""
    (tmp_path / "breaks_on_import.py").write_text("raise RuntimeError('needs a newer driver')\n")
    monkeypatch.syspath_prepend(tmp_path)
    breaks = Peer(name="breaks", package="breaks", modules=("breaks_on_import",), adapters=())
    known, out = {**PLANTED, "breaks": breaks}, tmp_path / "peers.json"
    for need, why in (
        ("right,absent", "--need absent: no_such is not installed"),
        ("breaks", "--need breaks: breaks_on_import cannot be imported: RuntimeError: needs a newer driver"),
        ("nobody", "--need nobody: it is not among the peers right,"),
    ):
        with pytest.raises(SystemExit) as end:
            run(out, "--need", need, known=known)
        assert end.value.code == 2 and why in capsys.readouterr().err
    assert not out.exists()
    assert run(out, "--need", "right", "--cells", "1", known=known) == 0


def test_what_a_peer_raises_is_on_the_screen(tmp_path: Path, capsys) -> None:
    assert run(tmp_path / "peers.json", "--cells", "1") == 0
    assert "failing refused: RuntimeError: has no kernel for it" in capsys.readouterr().err


def test_folders_that_path_files_name_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CuTe DSL's, where a peer's folder is on PYTHONPATH; a peer that needs one whose file is missing is absent."""
    inner = tmp_path / "some_library" / "packages"
    inner.mkdir(parents=True)
    (inner / "planted_by_path_file.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), "")))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    peer = Peer(name="inner", package="inner", modules=("planted_by_path_file",), adapters=())
    read_path_files()
    assert peer.absence == "planted_by_path_file is not installed"
    (tmp_path / "some_library.pth").write_text("some_library/packages\n")
    read_path_files()
    assert peer.absence == "" and str(inner) in sys.path


def test_peers_in_cute_dsl_need_its_packages() -> None:
    """The spec of a module is found without what it imports."""
    assert all("cutlass" in peers()[name].modules for name in ("cutedsl", "fa4"))


def test_ours_may_be_deepgemm_but_no_other_wrapped_library() -> None:
    """As in a plan, where a shipped time says that it is faster."""
    left_out = ours.Selection("cpu").plans.policy.exclude
    assert "linear_deepgemm" not in left_out and "linear_scaled_mm_torch" not in left_out
    assert {"linear_humming", "rms_norm_flashinfer"} <= {*left_out}


def test_outputs_of_ours_are_where_those_of_the_call_before_were() -> None:
    """As those that a peer allocates in a graph; each candidate has its own."""
    op = default_registry().op("linear")
    problem = op.problem("m=2,n=64,k=64")
    choice = ours.Selection("cpu").choices(op, problem, 0)[0]

    def places() -> list[int]:
        adapter = choice.adapter
        arguments = adapter.pack(problem, list(op.inputs(problem, 1, "cpu")))
        runs = [adapter.bind(problem, arguments) for _ in range(2)]
        kept.append(outputs := [adapter.outputs(arguments, run())[0] for run in runs])
        return [out.data_ptr() for out in outputs]

    kept: list[list[torch.Tensor]] = []
    first, second = places(), places()
    assert len({*first}) == len({*second}) == 1 and first != second
