#!/bin/bash
# Do C++ kernels execute more instructions than they did? Counted by valgrind at the AVX2 level, so that the answer is the same however
# busy the machine is. More (1) and wrong results (2) fail; without valgrind, or with another compiler (4), that is said and passes.
# After a change that is meant:  kernelbench check ci/kernel_counts.json --instructions --target cpu:avx2 --update
#   ci/check_counts.sh [FILE]
set -uo pipefail
cd "$(dirname "$0")/.."
file=${1:-ci/kernel_counts.json}
if ! grep -qw avx2 /proc/cpuinfo 2>/dev/null; then
  echo "no AVX2 here: instructions not counted"
  exit 0
fi
python -m gristmill.bench.cli check "$file" --instructions --target cpu:avx2 --min-effect 0.04 --markdown build/kernel_counts.md
code=$?
if [ "$code" = 4 ]; then
  echo "kernelbench check: exit status 4, which is no failure here"
  exit 0
fi
exit "$code"
