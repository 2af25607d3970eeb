#!/bin/bash
# All of CI, each step named and timed; the first failure ends it. GRISTMILL_FULL=1 adds what takes long.
#   ci/test.sh [JOBS]
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=${1:-2}
full=${GRISTMILL_FULL:-}
# Several test processes with a thread each use the cores better than one with several; and results do not depend on either.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=$PWD/src
unset PYTHONDONTWRITEBYTECODE  # hundreds of child processes would each compile the package anew

marks="not gpu and not slow"
if [ -n "$full" ]; then
  marks="not gpu"
  export GRISTMILL_FUZZ=20000  # damaged files per family; 300 otherwise
fi
begin=$SECONDS
step() {
  local name=$1 start=$SECONDS
  shift
  echo "== $name"
  "$@"
  echo "== $name: $((SECONDS - start)) s"
}

lint_log=$(mktemp)
bash ci/lint.sh >"$lint_log" 2>&1 &  # mypy keeps one core busy: what follows uses the other
lint=$!
trap 'kill "$lint" 2>/dev/null || true; rm -f "$lint_log"' EXIT
lint_result() {
  local status=0
  wait "$lint" || status=$?
  cat "$lint_log"
  return "$status"
}

step "time of the native build" python ci/budget.py
step "symbols of the library" python ci/check_symbols.py
levels=""
if [ -z "$full" ]; then  # each core for the highest level that it has and this processor runs
  levels=$(python -c 'from gristmill.kernel_registry.targets.probe import probe_cpu
print("|".join(level.partition(":")[2] for level in probe_cpu().levels))')
fi
step "sanitizers" env GRISTMILL_CPU_LEVELS="$levels" GRISTMILL_CPU_HIGHEST="${levels:+ON}" bash ci/sanitize.sh
step "lint, types, import contracts" lint_result
if [ -n "$full" ]; then
  step "a browser" bash ci/browser.sh
fi
budget=(-p ci.budget)
if [ -n "$full" ]; then budget=(); fi  # the slow tests have none
# A worker that has nothing left takes tests of the other: neither waits for the last long file.
step "tests" python -m pytest -q -n "$jobs" --dist worksteal -m "$marks" "${budget[@]}"
if [ -n "$full" ]; then
  step "hosts" env JOBS="$jobs" bash ci/hosts.sh "$marks"
fi
if [ -f ci/compile_matrix.py ]; then
  step "compile matrix" python ci/compile_matrix.py --jobs "$jobs" ${full:+--full}
fi
step "kernels against their ratios" bash ci/check_ratios.sh
step "kernels against their instruction counts" bash ci/check_counts.sh
step "wheel and sdist" bash ci/wheel_test.sh
echo "== all passed in $((SECONDS - begin)) s"
