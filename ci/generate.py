"""Write every file that is made from the registry, signatures, evidence and result files; no commit edits them by hand.

python ci/generate.py            write those that are out of date
python ci/generate.py --check    write nothing; exit 1 if one is out of date

| file | made from |
|---|---|
| kernel_registry/grades.json | reports, tests and the compile matrix (grades.py) |
| docs/kernels.md | the registry (tables.py) |
| the table in docs/quantization.md | bench/results/quality.json (lab/quality_table.py) |
| docs/figures/linear_int4.svg | bench/results/h200/linear_weight_only_table.json (figures.py) |
| docs/api.md, src/gristmill/ops.pyi | signatures and docstrings (api.py) |
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from gristmill.kernel_registry import grades as registered
from gristmill.kernel_registry.registry import default_registry

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "ci"), str(ROOT)]
import api  # noqa: E402
import figures  # noqa: E402
import grades  # noqa: E402
import tables  # noqa: E402

from lab import quality_table  # noqa: E402

QUANTIZATION = ROOT / "docs" / "quantization.md"
QUALITY = ROOT / "bench" / "results" / "quality.json"


def quantization() -> str:
    """docs/quantization.md with its table."""
    text = QUANTIZATION.read_text(encoding="utf-8")
    return quality_table.into(text, quality_table.render(json.loads(QUALITY.read_text(encoding="utf-8"))))


FILES: dict[Path, Callable[[], str]] = {
    registered.RECORDS: lambda: grades.records(default_registry()),
    tables.PAGE: lambda: tables.page(default_registry()),
    QUANTIZATION: quantization,
    api.PAGE: api.page,
    api.STUB: api.stub,
    figures.FIGURE: figures.linear_int4,
}
"""File -> its text. The records are first: the tables read them."""


def stale(write: bool = False) -> list[Path]:
    """The files that are out of date. write: write them."""
    found = []
    for path, make in FILES.items():
        text = make()
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        found.append(path)
        if write:
            path.write_text(text, encoding="utf-8")
            registered._recorded.cache_clear()
    return found


def main() -> int:
    """Write or check; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    checking = parser.parse_args().check
    for path in (found := stale(write=not checking)):
        how = "out of date, to write it: make generate" if checking else "written"
        print(f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}: {how}")
    return 1 if found and checking else 0


if __name__ == "__main__":
    sys.exit(main())
