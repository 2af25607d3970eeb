"""The gristmill command line."""

from __future__ import annotations

import click

from gristmill import __version__, console
from gristmill.tools.bench_serve.command import bench
from gristmill.tools.chat.command import chat
from gristmill.tools.commands.evaluate import evaluate
from gristmill.tools.commands.generate import generate
from gristmill.tools.commands.quantize import quantize
from gristmill.tools.commands.supported import supported
from gristmill.tools.commands.warm import warm
from gristmill.tools.serve import serve


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


for command in (generate, evaluate, quantize, warm, supported, bench, chat, serve):
    cli.add_command(command)


def main() -> None:
    """Entry point of the console script."""
    console.run(cli, "gristmill")


if __name__ == "__main__":
    main()
