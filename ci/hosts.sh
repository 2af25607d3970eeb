#!/bin/bash
# The tests inside the programs that gristmill runs in, each in its own environment (ci/host_env.sh): vLLM, SGLang, Ray, Dynamo and others.
#   ci/hosts.sh [MARKS] [HOST...]      MARKS: of pytest; all hosts by default
# Slow tests that matter for a host are marked "host" too, and run. JOBS hosts run at a time (2 by default), since most of a host is one
# process that keeps one core busy. Prints what ran, a host when it has ended; after the first failure no other begins.
set -euo pipefail
cd "$(dirname "$0")/.."
export marks=${1:-not gpu and (not slow or host)} logs
shift || true
hosts=("$@")
if [ ${#hosts[@]} = 0 ]; then
  hosts=(vllm vllm33 vllm24 ray)  # the longest first: none of them is left alone at the end
  for list in ci/hosts/*.txt; do
    host=$(basename "$list" .txt)
    [[ " ${hosts[*]} " = *" $host "* ]] || hosts+=("$host")
  done
fi
python=${PYTHON:-python}
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=$PWD/src
unset PYTHONDONTWRITEBYTECODE  # each process of a host would compile the package anew
begin=$SECONDS
for host in "${hosts[@]}"; do
  bash ci/host_env.sh "$host" "$python" >/dev/null
done
made=$((SECONDS - begin)) logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

inside() {
  local host=$1 start=$SECONDS status=0
  ".venv-$host/bin/python" -m pytest -q -m "$marks" "tests/integrations/$host" </dev/null >"$logs/$host" 2>&1 || status=$?
  printf '== inside %s\n%s\n' "$host" "$(cat "$logs/$host")"
  printf '%-14s %s; %d s\n' "$host" "$(grep -E "[0-9]+ (passed|failed|skipped)" "$logs/$host" | tail -n 1)" $((SECONDS - start)) >>"$logs/.summary"
  [ "$status" = 0 ] || exit 255  # xargs begins nothing more
}
export -f inside
status=0
printf '%s\n' "${hosts[@]}" | xargs -P "${JOBS:-2}" -I{} bash -c 'inside {}' || status=$?
printf '== inside hosts: %d s, of which %d s for their environments\n' $((SECONDS - begin)) $made
cat "$logs/.summary"
exit "$status"
