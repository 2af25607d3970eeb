#!/bin/bash
# Run the C++ cores under AddressSanitizer and UBSan: tests/native/*_asan.cpp, each a small program with its own main, built together
# with the cores at every ISA level that this processor has. Torch is not involved: a serial stub stands for its thread pool.
#   ci/sanitize.sh [build directory]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/sanitize}

# A core that no program calls would pass unseen.
missing=0
while IFS= read -r entry; do
  if ! grep -qw "$entry" tests/native/*_asan.cpp; then
    echo "no sanitizer program calls $entry: add tests/native/<op>_asan.cpp (tests/native/rms_norm_asan.cpp is the example)" >&2
    missing=1
  fi
done < <(find kernels -name '_*_cpu.cpp' -exec sed -n 's/^GM_KERNEL(\([a-z0-9_]*\)).*/\1/p' {} +)
[ "$missing" = 0 ] || exit 1

mkdir -p "$(dirname "$build")"
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
