"""The gristmill command line: generate text, evaluate, quantize."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gristmill import __version__, console
from gristmill.tools.bench_serve.command import bench
from gristmill.tools.chat.command import chat
from gristmill.tools.model_command import ModelCommand, SamplingCommand, load_llm, model_option
from gristmill.tools.serve import serve

if TYPE_CHECKING:
    from gristmill.runtime.llm import LLM


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="gristmill")
def cli() -> None:
    """Run language models with kernels that are verified and selected by measurement on this machine.

    A model is a Hugging Face directory: config.json, safetensors files, tokenizer.json; or a GGUF file; or a repository of the Hugging Face
    hub, by its name: org/name, org/name:file.gguf, org/name@revision. "gristmill supported" lists the architectures, and the checkpoint
    formats that are read and written.

    \b
    gristmill serve
    gristmill chat
    gristmill supported
    gristmill generate --model examples/models/docs-llama --prompt "The index"
    gristmill generate --model examples/models/docs-llama --prompt "The index" --quant int4_g128 --explain
    gristmill eval --model DIR --tokens ids.u16 --window 1024 --windows 16
    gristmill quantize --model DIR --quant nvfp4 --out DIR-nvfp4
    gristmill warm --model DIR
    gristmill bench serve --base-url http://127.0.0.1:8000

    The first run of a model verifies the kernels it needs and records the results; later runs start immediately.
    GRISTMILL_POLICY names a policy file (TOML) as --policy does: pins, exclude, strict, deterministic, batch_invariant.
    """


@cli.command(cls=SamplingCommand)
@model_option
@click.option("--prompt", required=True, metavar="TEXT", help="Text to continue.")
@click.option(
    "--params",
    "params_file",
    metavar="FILE",
    help="JSON object of sampling parameters, by the names of SamplingParams; options override it.",
)
@click.option(
    "--stats",
    is_flag=True,
    help="Print counts of the engine: of --speculate, drafts and their acceptance; of --kv-transfer, blocks.",
)
@click.option(
    "--explain",
    is_flag=True,
    help="Print which kernel each operation ran, and why; which steps ran as CUDA graphs.",
)
@click.option(
    "--drain-seconds",
    type=float,
    default=0.0,
    show_default=True,
    metavar="S",
    help="Seconds that generation continues after SIGTERM; then it ends with the text so far.",
)
@click.option("--json", "as_json", is_flag=True, help="Only JSON on stdout, at the end.")
def generate(
    prompt: str,
    params_file: str | None,
    drain_seconds: float,
    stats: bool,
    explain: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Continue a text. The text is streamed to stdout, or printed at the end where --n asks for several; timings go to stderr.

    Sampling follows the options and --params. Of the model's generation_config.json only the end tokens are used.

    \b
    With --json, one object: {"prompt", "text", "token_ids", "finish_reason" ("stop", "length", "abort" or "error"), "error" (null, or
    the cause of "error": {"code", "message"}), "logprobs" (null without --logprobs: {"token_id", "logprob", "rank", "top"}), all of
    the first completion; "choices" (these five of each), "prompt_logprobs" (null without the option), "prompt_tokens", "seconds",
    "tokens_per_second", "weight_bytes", "explain" (rows with --explain, else null), "decode_graphs"
    (likewise: {"seqs", "tokens_per_seq", "max_ctx", "captured", "bytes", "steps", "reason"}), "speculation" (null without
    --speculate: {"method", "drafts", "draft_tokens", "accepted_tokens", "accepted_by_position", "reasons", "gains", "draft_bytes"}),
    "kv_transfer" (null without --kv-transfer: {"stores", "queried_tokens", "loaded_tokens", "loaded_blocks", "saved_blocks",
    "loaded_bytes", "saved_bytes", "loading", "saving", "answers", "failures"})}
    """
    from gristmill.runtime.completion import GrowingCompletion
    from gristmill.runtime.sampling_params import SamplingParams
    from gristmill.tools.declared_options import given, params_of
    from gristmill.tools.reports import print_drafts, print_kernels, print_transfer

    params = params_of(params_file, given(SamplingParams, options))
    llm = load_llm(options, as_json, text=True, warm="off")
    begin = time.perf_counter()
    growing = [GrowingCompletion() for _ in range(params.n)]
    with _draining(llm, drain_seconds):
        for chunk in llm.stream(prompt, params):
            growing[chunk.choice].add(chunk)
            if not as_json and params.n == 1:
                click.echo(chunk.text, nl=False)
    seconds = time.perf_counter() - begin
    prompt_ids = llm.tokenizer.encode(prompt)
    completions = [one.completion(prompt_ids) for one in growing]
    tokens = sum(len(one.token_ids) for one in completions)
    rows, graphs = (llm.explain(), llm.explain_graphs()) if explain else (None, None)
    llm.engine.flush_kv_transfer()
    status = llm.engine.status()
    speculation, transfer = status.speculation, status.kv_transfer
    if as_json:
        choices = [
            {name: asdict(one)[name] for name in ("text", "token_ids", "finish_reason", "error", "logprobs")}
            for one in completions
        ]
        console.emit(
            {
                "prompt": prompt,
                **choices[0],
                "choices": choices,
                "prompt_logprobs": asdict(completions[0])["prompt_logprobs"],
                "prompt_tokens": len(prompt_ids),
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
                "weight_bytes": llm.weight_bytes,
                "explain": rows,
                "decode_graphs": graphs,
                "speculation": None if speculation is None else asdict(speculation),
                "kv_transfer": None if transfer is None else asdict(transfer),
            }
        )
        return
    if params.n > 1:
        for one in completions:
            click.echo(f"[{one.choice}] {one.text}")
    else:
        click.echo()
    ends = ", ".join(f"{one.finish_reason}{f' ({one.error})' if one.error else ''}" for one in completions)
    console.err().print(
        f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds:.1f}/s), finish: {ends}", style="dim"
    )
    if stats:
        print_drafts(speculation)
        print_transfer(transfer)
    if rows is not None:
        print_kernels(rows)
    if graphs:
        console.table(
            "Decode steps",
            [
                "requests up to",
                "tokens each",
                "context up to",
                "CUDA graph",
                "MB",
                "steps",
                "why not",
            ],
            [
                [
                    r["seqs"] or "",
                    r["tokens_per_seq"] or "",
                    r["max_ctx"] or "",
                    "yes" if r["captured"] else "no",
                    f"{r['bytes'] / 1e6:.1f}" if r["captured"] else "",
                    r["steps"],
                    r["reason"],
                ]
                for r in graphs
            ],
            right=("requests up to", "tokens each", "context up to", "MB", "steps"),
        )


@contextmanager
def _draining(llm: LLM, seconds: float) -> Iterator[None]:
    """Drain the engine on SIGTERM while the block runs."""
    before = signal.signal(signal.SIGTERM, lambda *_: llm.drain(seconds))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@cli.command(name="eval", cls=ModelCommand)
@model_option
@click.option(
    "--tokens", "tokens_file", required=True, metavar="FILE", help="Token ids, little-endian uint16."
)
@click.option("--window", type=int, default=1024, show_default=True, metavar="N", help="Tokens per window.")
@click.option(
    "--windows",
    type=int,
    default=96,
    show_default=True,
    metavar="N",
    help="Windows, contiguous from token 0.",
)
@click.option("--json", "as_json", is_flag=True, help="Only JSON on stdout.")
def evaluate(tokens_file: str, window: int, windows: int, as_json: bool, **options: Any) -> None:
    """Perplexity of a model on a file of token ids: how well it predicts each token from those before it.

    Each window is evaluated separately; all its tokens but the first are predicted. Loss is in nats per token.

    \b
    With --json, one object: {"loss", "perplexity", "tokens", "seconds"}; tokens = windows x (window - 1)
    """
    from gristmill.tools.evaluate import evaluate as run
    from gristmill.tools.evaluate import read_tokens

    tokens = read_tokens(tokens_file)
    model, quant = options["model"], options["quant"] or "as stored"
    llm = load_llm(options, as_json, max_batch_tokens=max(2048, window), warm="off")
    with _bar("evaluating", as_json) as advance:
        evaluation = run(llm.engine, tokens, window, windows, advance)
    if as_json:
        console.emit(
            {name: getattr(evaluation, name) for name in ("loss", "perplexity", "tokens", "seconds")}
        )
        return
    console.table(
        f"{model} ({quant}) on {tokens_file}",
        ["loss (nats/token)", "perplexity", "tokens", "seconds"],
        [
            [
                f"{evaluation.loss:.4f}",
                f"{evaluation.perplexity:.3f}",
                f"{evaluation.tokens:,}",
                f"{evaluation.seconds:.1f}",
            ]
        ],
        right=("loss (nats/token)", "perplexity", "tokens", "seconds"),
    )


@cli.command()
@click.option(
    "--model",
    required=True,
    metavar="MODEL",
    help="Model directory in Hugging Face's layout, unquantized, or a repository of its hub: org/name[@REVISION].",
)
@click.option(
    "--quant", required=True, metavar="SCHEME", help="int4_g128, int8_ch, fp8_block, mxfp4, nvfp4, ..."
)
@click.option("--out", required=True, metavar="DIR", help="New directory to write.")
@click.option(
    "--format",
    "form",
    default="gristmill",
    show_default=True,
    metavar="F",
    help="Checkpoint format to write: one that 'gristmill supported' lists as written.",
)
@click.option(
    "--method",
    type=click.Choice(["rtn", "gptq", "awq"]),
    default="rtn",
    show_default=True,
    help="Round to nearest, GPTQ or AWQ; the last two need --calibration.",
)
@click.option(
    "--calibration",
    metavar="FILE",
    help="Token ids for GPTQ and AWQ, little-endian uint16, of text similar to the intended use.",
)
@click.option(
    "--window", type=int, default=512, show_default=True, metavar="N", help="Tokens per calibration window."
)
@click.option(
    "--windows", type=int, default=64, show_default=True, metavar="N", help="Calibration windows, contiguous."
)
@click.option(
    "--first",
    type=int,
    default=0,
    show_default=True,
    metavar="N",
    help="Index of the first token of the first window.",
)
@click.option(
    "--act-order/--no-act-order",
    default=True,
    show_default=True,
    help="GPTQ: process columns in order of importance. Groups keep their positions, so every reader can load the result.",
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="auto|cpu|cuda",
    help="Device for calibration and rounding. auto: the first GPU that kernels run on, else the CPU.",
)
@click.option("--json", "as_json", is_flag=True, help="Only JSON on stdout.")
def quantize(
    model: str,
    quant: str,
    out: str,
    form: str,
    method: str,
    calibration: str | None,
    window: int,
    windows: int,
    first: int,
    act_order: bool,
    device: str,
    as_json: bool,
) -> None:
    """Quantize the linear and expert weights of a model and write a model directory.

    Embeddings, logits head, norms and router are kept. The tensors of the format replace each NAME.weight; gristmill's own
    are NAME.codes, NAME.scales, NAME.zero and NAME.global_scale. "generate" and "eval" load the directory with the same
    results as --quant. transformers reads compressed-tensors, fp8 and mxfp4 directories, and gptq ones with the package
    gptqmodel. For gpt-oss, mxfp4 applies to the experts; all other weights stay in floats.

    GPTQ and AWQ run calibration text through the quantized layers, so that each layer compensates for errors of the previous
    ones. Layers are written one by one: an interrupted run resumes after the last complete layer when it is started again
    with the same options, with the same result.

    \b
    With --json, one object: {"out", "format", "scheme", "method", "tensors" (quantized ones), "bytes_before", "bytes_after",
    "resumed" (layers that existed), "notes" (weights treated differently, and why), "seconds"}
    """
    from gristmill.quant.checkpoints.native import NativeCheckpoint
    from gristmill.quant.checkpoints.text_part import TextPartCheckpoint
    from gristmill.quant.writing.checkpoint import write_quantized
    from gristmill.runtime.hub import local_model
    from gristmill.runtime.loader.config import load_config, open_checkpoint
    from gristmill.runtime.loader.load import parse_scheme
    from gristmill.runtime.models import model_table
    from gristmill.runtime.progress import no_bar
    from gristmill.tools.calibration import make_method
    from gristmill.tools.evaluate import read_tokens

    scheme = parse_scheme(quant)
    if scheme is None:
        raise click.UsageError("--quant names no scheme")
    if (method == "rtn") != (calibration is None):
        raise click.UsageError("--calibration FILE goes together with --method gptq or awq")
    if first < 0:
        raise click.UsageError(f"--first must be at least 0, got {first}")
    begin = time.perf_counter()
    tokens = None if calibration is None else read_tokens(calibration)[first:]
    with no_bar() if as_json else nullcontext():
        directory = local_model(model)
    if isinstance(open_checkpoint(directory), NativeCheckpoint | TextPartCheckpoint):
        raise click.UsageError(
            f"{directory} is not in the layout of a text model of Hugging Face, which is what is written: load it with --quant instead"
        )
    chosen = make_method(
        method, directory, tokens, window=window, windows=windows, device=device, act_order=act_order
    )
    with _bar("quantizing", as_json) as advance:
        report = write_quantized(
            directory, Path(out), model_table(load_config(directory)), scheme, advance, form, chosen
        )
    seconds = time.perf_counter() - begin
    if as_json:
        console.emit(
            {
                "out": out,
                "format": form,
                "scheme": str(scheme),
                "method": method,
                **report,
                "seconds": seconds,
            }
        )
        return
    for note in report["notes"]:
        console.err().print(note, style="dim", highlight=False)
    console.out().print(
        f"{out}: {report['tensors']} weights in {scheme}; tensors {report['bytes_before'] / 1e6:.1f} MB -> "
        f"{report['bytes_after'] / 1e6:.1f} MB in {seconds:.1f} s"
    )


@cli.command(cls=ModelCommand)
@model_option
@click.option("--json", "as_json", is_flag=True, help="Only JSON on stdout.")
def warm(as_json: bool, **options: Any) -> None:
    """Select, verify and compile ahead of time every kernel that a model calls, so that later processes start from the store.

    For the image of a container, or after an update. This is what every engine does when it is loaded; --warm is ignored. The store of the
    policy keeps the records, and Triton's cache the compiled code: with an entry "cache" in the policy both are in that folder, which a
    container image takes along, under the same path.

    With --json: "seconds" by phase ("weights", "selection", "verification", "compilation", "graphs"), "graphs" (captured), "graph_bytes",
    "kernels" (plan entries resolved), "verified" (what had no record before), "ran" (whether steps ran, as on a GPU), "compiled" and "reused"
    (kernels of Triton, in this process), "store" (its path).
    """
    options["warm"] = "auto"
    from gristmill.kernel_registry.policy import Policy

    policy = Policy.load(options["policy"]) if options["policy"] else Policy.current()
    report = load_llm(options, as_json).engine.warmed
    assert report is not None
    if as_json:
        console.emit(asdict(report) | {"store": str(policy.store_path)})
        return
    rows = [[phase, f"{seconds:.1f}"] for phase, seconds in report.seconds.items()]
    console.table("Warm-up", ["phase", "seconds"], rows, right=("seconds",))
    console.err().print(f"records in {policy.store_path}")


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Only JSON on stdout.")
def supported(as_json: bool) -> None:
    """Architectures that can be loaded, checkpoint formats that are read and written, methods of speculation, KV stores and chat formats, with
    those of plugins.

    \b
    With --json, one object: {"families" ({"name", "architectures", "gguf"}), "architectures" ({"name", "proven": what tests proved of it,
    by "logits and ids", "quantized", "GGUF", "ranks", "drafts", as runtime/models/supported.md explains}), "formats"
    ({"name", "written"}), "proposers" (methods of --speculate: {"name", "summary"}), "kv_stores" (of --kv-transfer: {"name", "summary"}),
    "chat_formats"
    (of --chat-format: {"name", "summary"}), "plugins_left_out" (each plugin of gristmill.models, gristmill.formats, gristmill.proposers,
    gristmill.kv_stores or gristmill.chat_formats that is not used, with its reason)}
    """
    from gristmill.quant import formats
    from gristmill.runtime import kv_transfer, models, speculation
    from gristmill.runtime.chat import formats as chat_formats
    from gristmill.runtime.models.proven import COLUMNS, proven

    families = {id(family): family for family in models.families().values()}.values()
    left_out = (
        *models.failures(),
        *formats.failures(),
        *speculation.failures(),
        *kv_transfer.failures(),
        *chat_formats.failures(),
    )
    supported: dict[str, list[dict[str, Any]]] = {
        "families": [
            {
                "name": family.name,
                "architectures": list(family.architectures),
                "gguf": [str(gguf) for gguf in family.gguf],
            }
            for family in families
        ],
        "architectures": [
            {"name": name, "proven": proven().get(name, dict.fromkeys(COLUMNS, ()))}
            for name in (*models.families(), *models.text_parts())
        ],
        "formats": [
            {"name": name, "written": spec.write is not None}
            for name, spec in formats.checkpoint_formats().items()
        ],
        "proposers": [
            {"name": spec.name, "summary": spec.summary} for spec in speculation.proposers().values()
        ],
        "kv_stores": [{"name": spec.name, "summary": spec.summary} for spec in kv_transfer.stores().values()],
        "chat_formats": [
            {"name": one.name, "summary": one.summary} for one in chat_formats.formats().values()
        ],
        "plugins_left_out": [failure.as_dict() for failure in left_out],
    }
    if as_json:
        console.emit(supported)
        return
    console.table(
        "Models, and what tests proved of them",
        ["architecture", *COLUMNS],
        [
            # The result files of GPUs are in the JSON.
            [
                a["name"],
                *(", ".join(what.split(" (")[0] for what in a["proven"][column]) for column in COLUMNS),
            ]
            for a in supported["architectures"]
        ],
    )
    console.table(
        "Checkpoint formats",
        ["quant_method", "read", "written"],
        [[f["name"], "yes", "yes" if f["written"] else "no"] for f in supported["formats"]],
    )
    console.table(
        "Speculation",
        ["method", "drafts"],
        [[p["name"], p["summary"]] for p in supported["proposers"]],
    )
    console.table(
        "KV transfer",
        ["store", "argument and place"],
        [[store["name"], store["summary"]] for store in supported["kv_stores"]],
    )
    console.table(
        "Conversations",
        ["chat format", "messages"],
        [[one["name"], one["summary"]] for one in supported["chat_formats"]],
    )
    for failure in left_out:
        console.err().print(str(failure), highlight=False, markup=False)


@contextmanager
def _bar(description: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr; yields a function to call with (done, total)."""
    from rich.progress import Progress

    with Progress(console=console.err(), transient=True, disable=quiet) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


cli.add_command(bench)
cli.add_command(chat)
cli.add_command(serve)


def main() -> None:
    """Entry point of the console script."""
    console.run(cli, "gristmill")


if __name__ == "__main__":
    main()
