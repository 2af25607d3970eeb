"""Write every file that is made from the registry, signatures, evidence and result files; no commit edits them by hand.

python ci/generate.py            write those that are out of date
python ci/generate.py --check    write nothing; exit 1 if one is out of date
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

from gristmill.kernel_registry import grades as registered
from gristmill.kernel_registry.registry import default_registry
from gristmill.runtime.models import proven

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "ci"), str(ROOT)]
import api  # noqa: E402
import calls  # noqa: E402
import grades  # noqa: E402
import tables  # noqa: E402
from tests.runtime import proofs  # noqa: E402

from lab import quality_table  # noqa: E402
from lab.peers import page as peers_page  # noqa: E402

QUANTIZATION = ROOT / "docs" / "quantization.md"
LINEAR_INT4 = runpy.run_path(str(ROOT / "docs" / "figures" / "linear_int4.py"))
QUALITY = ROOT / "bench" / "results" / "quality.json"


def quantization() -> str:
    """docs/quantization.md with its table."""
    table = quality_table.render(json.loads(QUALITY.read_text(encoding="utf-8")))
    return quality_table.into(QUANTIZATION.read_text(encoding="utf-8"), table)


FILES: dict[Path, Callable[[], str]] = {
    registered.RECORDS: lambda: grades.records(default_registry()),
    tables.PAGE: lambda: tables.page(default_registry()),
    QUANTIZATION: quantization,
    peers_page.PAGE: peers_page.page,
    proven.PAGE: proofs.page,
    api.PAGE: api.page,
    api.STUB: api.stub,
    LINEAR_INT4["FIGURE"]: LINEAR_INT4["figure"],
    calls.STUB: lambda: calls.text(default_registry()),
    **calls.headers(default_registry()),
    **calls.argument_headers(),
}
"""File -> its text. The records are first: the tables read them."""


def stale(write: bool = False) -> list[Path]:
    """The files that are out of date, which are written if `write`."""
    found = []
    for path, make in FILES.items():
        text = make()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            found.append(path)
            if write:
                path.write_text(text, encoding="utf-8")
                registered._recorded.cache_clear()
    return found


def main(arguments: list[str]) -> int:
    """Write or check; the exit status."""
    checking = arguments == ["--check"]
    if arguments and not checking:
        raise SystemExit(f"expected --check or nothing, got {' '.join(arguments)}")
    found = stale(write=not checking)
    for path in found:
        print(f"{path}: {'out of date, to write it: make generate' if checking else 'written'}")
    return int(checking and bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
