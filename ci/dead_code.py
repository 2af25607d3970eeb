"""Find code that nothing uses, by vulture. There is no allow-list: what is found is deleted, or used.

    python ci/dead_code.py

Uses that vulture cannot see count too: launchers that specs name as ``"module:attr"``, names that pytest or another library
looks up, planted faults that a test names by a string, attributes of other libraries' objects, names that generated source calls,
fields in tables of kernels, and what a host of `gristmill.integrations` calls.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections.abc import Iterator
from keyword import iskeyword
from pathlib import Path

import repository
from vulture import Vulture

PRESCRIBED = (
    "pytestmark",
    "pytest_*",
    "collect_ignore_glob",
    "handle_*",
    "__getattr__",
    "__dir__",
    "__all__",
    "teardown",
    "_apply",
    "recurse",
    "extra_repr",
    "intercepted_binops",
    "capture_signals",
    "daemon_threads",
    "protocol_version",
    "log_message",
    "do_[A-Z]*",
    "close_connection",
    "connection_made",
    "connection_lost",
    "data_received",
    "on_headers_complete",
    "on_body",
    "on_message_complete",
)
"""Names that pytest, html.parser, http.server, hypothesis, jinja2, uvicorn, httptools, asyncio's protocols or Python itself look up; methods and
arguments of torch.nn.Module."""
DECORATED = ("@pytest.fixture*", "@invariant*", "@initialize*", "@rule*")


def named(files: list[Path], anything: bool) -> Iterator[str]:
    """Names, as patterns, that strings look up: ``"module:attr"``, or with `anything` whole strings too."""
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            elif isinstance(node, ast.JoinedStr):
                text = "".join(str(p.value) if isinstance(p, ast.Constant) else "*" for p in node.values)
            else:
                continue
            if match := re.fullmatch(r"[\w.*]*:(\w[\w*]*)", text):
                yield match[1]
            elif anything and text.isidentifier():
                yield text
            else:  # source that is compiled as text
                yield from re.findall(r"\b([A-Za-z]\w+)[(\[]", text)


def columns() -> Iterator[str]:
    """Fields that the tables of compiled kernels name."""
    for table in sorted((repository.ROOT / "kernels").rglob("*.json")):
        yield from re.findall(r'"(\w+)"', table.read_text(encoding="utf-8"))


def prescribed_by_hosts(files: list[Path]) -> Iterator[str]:
    """Methods, their arguments and attributes of classes that derive from a class of another package, which uses them."""
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        foreign = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("gristmill")
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and foreign & {ast.unparse(base) for base in node.bases}:
                for part in node.body:
                    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield part.name
                        yield from (argument.arg for argument in part.args.args)
                    elif isinstance(part, ast.AnnAssign):
                        yield ast.unparse(part.target)


def unused(files: list[Path], names: list[str]) -> list[str]:
    """A line for each definition in `files` that neither they nor `names` use."""
    patterns = {name for name in names if "*" in name}
    search = Vulture(ignore_names=[*PRESCRIBED, *patterns], ignore_decorators=list(DECORATED))
    search.scavenge([str(file) for file in files])
    search.scan("\n".join(sorted({name for name in names if name.isidentifier() and not iskeyword(name)})))
    return [
        f"{item.filename.relative_to(repository.ROOT)}:{item.first_lineno}: unused {item.typ} {item.name}"
        for item in search.get_unused_code(min_confidence=60)
        if item.typ != "attribute" or _own(item.filename, item.first_lineno, item.name)
    ]


def _own(file: Path, line: int, attribute: str) -> bool:
    """Whether the statement at `line` sets an attribute of ``self``."""
    return f"self.{attribute}" in file.read_text(encoding="utf-8").splitlines()[line - 1]


def main() -> int:
    """Print what nothing uses; 1 if there is any."""
    product = repository.files((*repository.PACKAGE, "lab", "ci", "examples"))
    tests = repository.files(("tests",))
    names = [*named(product, anything=False), *named(tests, anything=True), *columns()]
    names += prescribed_by_hosts(repository.files(("integrations",)))
    return repository.report(unused([*product, *tests], names))


if __name__ == "__main__":
    gc.disable()  # trees of whole files, and hardly any garbage
    sys.exit(main())
