"""gristmill supported: architectures, formats, methods and stores that are there."""

from __future__ import annotations

from typing import Any

import click

from gristmill import console


@click.command()
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
