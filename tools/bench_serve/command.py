"""The command line of `gristmill bench serve`."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gristmill import console
from gristmill.runtime.errors import UsageError

if TYPE_CHECKING:
    from gristmill.tools.bench_serve.client import Answer
    from gristmill.tools.bench_serve.load import Load

PREPARED = 10_000
"""The most requests that are made before the first is sent; further ones are made one at a time."""


class Length(click.ParamType[Any]):
    """A `Range`."""

    name = "length"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """``128`` or ``64:256``."""
        from gristmill.tools.bench_serve.prompts import Range

        try:
            return Range.parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


@click.group()
def bench() -> None:
    """Measure what serves models. Kernels are measured by kernelbench."""


@bench.command()
@click.option(
    "--base-url", required=True, metavar="URL", help="http[s]://HOST:PORT of the server, with or without /v1."
)
@click.option(
    "--model", metavar="NAME", help="The model's name in the API. Default: the first that the server lists."
)
@click.option(
    "--api",
    type=click.Choice(["chat", "completions"]),
    default="chat",
    show_default=True,
    help="Which route is asked.",
)
@click.option(
    "--request-rate",
    type=click.FloatRange(0, min_open=True),
    metavar="R",
    help="Requests per second, sent whether or not answers come.",
)
@click.option(
    "--burstiness",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    metavar="B",
    help="Of the intervals at --request-rate: 1 = Poisson; less = in bursts, more = more evenly.",
)
@click.option(
    "--max-concurrency",
    type=click.IntRange(1),
    metavar="N",
    help="The most requests at a time. Default: 8; with --request-rate, any number.",
)
@click.option(
    "--num-prompts",
    type=click.IntRange(1),
    metavar="N",
    help="How many requests. Default: 100, or what --seconds allows.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    metavar="S",
    help="Send requests for so long; unfinished ones are waited for.",
)
@click.option(
    "--dataset",
    default="random",
    show_default=True,
    metavar="random|FILE",
    help='Random words, or a file: JSON lines with "messages" or "prompt" and "max_tokens", or ShareGPT\'s JSON.',
)
@click.option(
    "--input-tokens",
    type=Length(),
    default="256",
    show_default=True,
    metavar="N|MIN:MAX",
    help="random: words of a prompt, most of which are one token.",
)
@click.option(
    "--output-tokens",
    type=Length(),
    metavar="N|MIN:MAX",
    help="max_tokens. Default: 128; of a file, what it says.",
)
@click.option(
    "--prefix-tokens",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="random: words at the beginning that prompts share, in addition.",
)
@click.option(
    "--prefixes",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="random: how many such beginnings there are.",
)
@click.option("--tokenizer", metavar="MODEL", help="random: a model whose tokenizer makes lengths exact.")
@click.option(
    "--ignore-eos", is_flag=True, help="Ask for ignore_eos, so that every answer has max_tokens tokens."
)
@click.option(
    "--extra-body",
    default="{}",
    metavar="JSON",
    help='Further entries of each request, as {"temperature": 0}.',
)
@click.option(
    "--warmup",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    metavar="N",
    help="Requests before, which do not count.",
)
@click.option(
    "--slo",
    multiple=True,
    metavar="ttft|tpot|e2e:MS",
    help="A limit in milliseconds, for goodput: requests within all limits. Repeatable.",
)
@click.option(
    "--api-key", envvar="OPENAI_API_KEY", show_envvar=True, metavar="KEY", help="Sent as a bearer token."
)
@click.option(
    "--header", "headers", multiple=True, metavar="NAME:VALUE", help="A further header. Repeatable."
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="S",
    help="Seconds of a request, after which it failed.",
)
@click.option("--insecure", is_flag=True, help="Accept any certificate.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Of prompts and arrivals.")
@click.option(
    "--json", "json_file", metavar="FILE", help="Write the results there; - = to stdout, instead of tables."
)
def serve(
    base_url: str,
    model: str | None,
    api: str,
    request_rate: float | None,
    burstiness: float,
    max_concurrency: int | None,
    num_prompts: int | None,
    seconds: float | None,
    slo: Sequence[str],
    api_key: str | None,
    headers: Sequence[str],
    timeout: float,
    insecure: bool,
    warmup: int,
    seed: int,
    json_file: str | None,
    **options: Any,
) -> None:
    """Put load on a server of OpenAI's API, and show what its clients see.

    Any server that streams chat completions or completions can be measured, so that servers are compared by one program. Latencies count from
    the time at which a request was due: at --request-rate that is independent of the server, so that requests which had to wait for a slow one
    show it. Ctrl-C ends the run and shows what there is.

    \b
    ttft  time to first token: the first chunk with text, reasoning or a tool call
    tpot  time per output token after the first, one value per request
    itl   time between two chunks, one value per chunk
    e2e   the whole request

    \b
    With --json, one object: {"server", "model", "options", "seconds", "interrupted" (requests, or null), "requests" ({"complete", "failed",
    "per_second"}), "errors" (kind: {"count", "example"}), "input_tokens", "input_tokens_per_second", "cached_tokens", "output_tokens",
    "output_tokens_per_second", "output_tokens_counted_by" ("server" or "chunks"), "chunks", "milliseconds" ({"ttft", "tpot", "itl", "e2e"}:
    {"mean", "p50", "p90", "p95", "p99", "max"}), "goodput" (null without --slo: {"slo", "requests", "per_second"}), "client"
    ({"cpu_seconds", "cpu_share", "cpu_microseconds_per_chunk", "sent_late_ms"})}
    """
    try:
        import uvloop

        from gristmill.tools.bench_serve.client import Client
        from gristmill.tools.bench_serve.load import Load, run, warm_up
        from gristmill.tools.bench_serve.requests import first_model, prompts_of, requests_of
        from gristmill.tools.bench_serve.results import summary
    except ImportError as error:
        raise UsageError(f"bench serve needs {error.name}: pip install 'gristmill[serve]'") from error

    limits = _limits(slo)
    extra = _object(options["extra_body"])
    if request_rate is None and max_concurrency is None:
        max_concurrency = 8
    if num_prompts is None and seconds is None:
        num_prompts = 100
    load = Load(request_rate, burstiness, max_concurrency, num_prompts, seconds, seed)
    given = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    given |= dict(_header(text) for text in headers)
    client = Client(base_url, given, timeout, insecure)
    quiet = json_file == "-"

    async def measured() -> tuple[str, Any]:
        name = model or first_model(await client.get("/models"))
        requests = requests_of(client, api, name, extra, prompts_of(options, seed), options["ignore_eos"])
        await warm_up(client, requests, warmup, max_concurrency or 8)
        if num_prompts is not None and num_prompts <= PREPARED:
            requests = iter(list(itertools.islice(requests, num_prompts)))
        with _bar(load, quiet) as on_end:
            try:
                return name, await run(client, requests, load, on_end)
            finally:
                client.close()

    name, done = uvloop.run(measured())
    shown = {
        "request_rate": request_rate,
        "burstiness": burstiness,
        "max_concurrency": max_concurrency,
        "num_prompts": num_prompts,
        "seconds": seconds,
        "api": api,
        "seed": seed,
        **{key: str(value) if isinstance(value, str) else _length(value) for key, value in options.items()},
    }
    results = {"server": base_url, "model": name, "options": shown, **summary(done, limits)}
    if quiet:
        console.emit(results)
    else:
        from gristmill.tools.bench_serve.report import show

        show(results)
        if json_file is not None:
            Path(json_file).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if done.interrupted is not None:
        raise click.exceptions.Exit(console.INTERRUPTED)
    if not results["requests"]["complete"]:
        raise click.exceptions.Exit(1)


def _length(value: Any) -> Any:
    """A `Range` as it is written; other values as they are."""
    return f"{value.least}:{value.most}" if hasattr(value, "least") else value


def _limits(texts: Sequence[str]) -> dict[str, float]:
    limits = {}
    for text in texts:
        name, _, number = text.partition(":")
        try:
            limits[name] = float(number)
        except ValueError:
            name = ""
        if name not in ("ttft", "tpot", "e2e") or not 0 < limits[name] < float("inf"):
            raise UsageError(f"--slo must be ttft:MS, tpot:MS or e2e:MS, got {text!r}")
    return limits


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"--extra-body must be a JSON object, got {text!r}")
    return value


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise UsageError(f"--header must be NAME:VALUE, got {text!r}")
    return name.strip(), value.strip()


@contextmanager
def _bar(load: Load, quiet: bool) -> Iterator[Callable[[Answer], None]]:
    """A bar of requests on stderr, drawn at most a few times per second."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if quiet or not sys.stderr.isatty():
        yield lambda answer: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    count = failed = 0
    drawn = time.perf_counter()
    with Progress(*columns, console=console.err(), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("requests", total=load.requests)

        def on_end(answer: Answer) -> None:
            nonlocal count, failed, drawn
            count, failed = count + 1, failed + bool(answer.error)
            if answer.ended - drawn > 0.25:
                drawn = answer.ended
                bar.update(
                    task, completed=count, description=f"requests, {failed} failed" if failed else "requests"
                )
                bar.refresh()

        yield on_end
