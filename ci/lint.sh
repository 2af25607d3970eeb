#!/bin/bash
# Formatting, style, dead code, duplicates, subjects of commits, types and the direction of imports. Run by `make lint` and `make test`.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff format --check --quiet . || { ruff format --check .; echo 'to format: make format' >&2; exit 1; }
git ls-files -z '*.cpp' '*.cu' '*.hip' '*.h' '*.cuh' '*.c' | xargs -0 clang-format --dry-run --Werror
ruff check .
python ci/dead_code.py
python ci/near_duplicates.py
python ci/commit_subjects.py
mypy
PYTHONPATH=src lint-imports --no-logo
