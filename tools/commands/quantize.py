"""gristmill quantize: a model directory with quantized weights."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path

import click

from gristmill import console
from gristmill.tools.commands.bar import bar


@click.command()
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
    with bar("quantizing", as_json) as advance:
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
