#!/bin/bash
# Run the C++ cores under AddressSanitizer and UBSan: tests/native/*_asan.cpp, each a small program with its own main, built together
# with the cores at every ISA level that this processor has. Torch is not involved: a serial stub stands for its thread pool.
#   ci/sanitize.sh [build directory]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/sanitize}
cmake -S . -B "$build" -G Ninja -DGRISTMILL_SANITIZE=ON -DGRISTMILL_CUDA=off >"$build.log" 2>&1 || { cat "$build.log" >&2; exit 1; }
cmake --build "$build" --parallel "${JOBS:-2}" >"$build.log" 2>&1 || { cat "$build.log" >&2; exit 1; }
export ASAN_OPTIONS=detect_leaks=1:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1
count=0
for program in "$build"/*_asan; do
  "$program"
  count=$((count + 1))
done
[ "$count" -gt 0 ] || { echo "no sanitizer programs were built" >&2; exit 1; }
echo "sanitizers: $count program(s) clean"
