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

# What keeps one core busy runs beside other steps: `beside NAME COMMAND...` begins it, `result NAME` waits for it and prints its output.
logs=$(mktemp -d)
declare -A running
beside() {
  local name=$1
  shift
  "$@" >"$logs/$name" 2>&1 &
  running[$name]=$!
}
result() {
  local status=0
  wait "${running[$1]}" || status=$?
  unset "running[$1]"
  cat "$logs/$1"
  return "$status"
}
trap 'kill "${running[@]}" 2>/dev/null || true; rm -rf "$logs"' EXIT

beside lint bash ci/lint.sh
step "time of the native build" python ci/budget.py
step "symbols of the library" python ci/check_symbols.py
levels=""
if [ -z "$full" ]; then  # each core for the highest level that it has and this processor runs
  levels=$(python -c 'from gristmill.kernel_registry.targets.probe import probe_cpu
print("|".join(level.partition(":")[2] for level in probe_cpu().levels))')
fi
step "sanitizers" env GRISTMILL_CPU_LEVELS="$levels" GRISTMILL_CPU_HIGHEST="${levels:+ON}" bash ci/sanitize.sh
step "lint, types, import contracts" result lint
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
beside counts bash ci/check_counts.sh  # counts are the same however busy the machine is
step "wheel and sdist" bash ci/wheel_test.sh
step "kernels against their instruction counts" result counts
echo "== all passed in $((SECONDS - begin)) s"
