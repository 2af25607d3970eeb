#!/bin/bash
# The tests inside the programs that gristmill runs in, each in its own environment (ci/host_env.sh): vLLM, SGLang, Ray, Dynamo and others.
#   ci/hosts.sh [MARKS] [HOST...]      MARKS: of pytest; all hosts by default
# Slow tests that matter for a host are marked "host" too, and run. Prints what ran; the first failure ends it.
set -euo pipefail
cd "$(dirname "$0")/.."
marks=${1:-not gpu and (not slow or host)}
shift || true
hosts=("$@")
[ ${#hosts[@]} -gt 0 ] || for list in ci/hosts/*.txt; do hosts+=("$(basename "$list" .txt)"); done
python=${PYTHON:-python}
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=$PWD/src
begin=$SECONDS summary=""
for host in "${hosts[@]}"; do
  start=$SECONDS
  interpreter=$(bash ci/host_env.sh "$host" "$python")
  made=$((SECONDS - start)) log=$(mktemp)
  echo "== inside $host"
  "$interpreter" -m pytest -q -m "$marks" "tests/integrations/$host" </dev/null 2>&1 | tee "$log"
  summary+=$(printf '%-14s %s; environment in %d s' "$host" "$(grep -E "[0-9]+ (passed|failed|skipped)" "$log" | tail -n 1)" "$made")$'\n'
  rm -f "$log"
done
printf '== inside hosts: %d s\n%s' $((SECONDS - begin)) "$summary"
