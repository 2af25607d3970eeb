#!/bin/bash
# Style, types and the direction of imports. Run by `make lint` and `make test`.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
mypy
PYTHONPATH=src lint-imports --no-logo
