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
# What mypy read of a file holds for the same text in another clone. One mypy at a time, since its cache is a database.
cache=${XDG_CACHE_HOME:-$HOME/.cache}/gristmill
{ mkdir -p "$cache" && [ -w "$cache" ]; } 2>/dev/null || { cache=.mypy_cache && mkdir -p "$cache"; }
lock=()
if command -v flock >/dev/null; then lock=(flock "$cache/mypy.lock"); fi
${lock[@]+"${lock[@]}"} mypy --cache-dir "$cache/mypy"
PYTHONPATH=src lint-imports --no-logo
