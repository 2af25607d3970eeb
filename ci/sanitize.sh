#!/bin/bash
# Run the C++ kernels under AddressSanitizer and UBSan: tests/native/*_asan.cpp, each a small program with its own main, built together
# with the kernels at every ISA level, or at those that GRISTMILL_CPU_LEVELS and GRISTMILL_CPU_HIGHEST leave (cmake/cpu.cmake). Torch is
# not involved: a serial stub stands for its thread pool. Every entry that was built must have been run, at every level that this
# processor has.
#   ci/sanitize.sh [build directory]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/sanitize}

mkdir -p "$(dirname "$build")"
cmake -S . -B "$build" -G Ninja -DGRISTMILL_SANITIZE=ON -DGRISTMILL_CUDA=off \
  -DGRISTMILL_CPU_LEVELS="${GRISTMILL_CPU_LEVELS:-}" -DGRISTMILL_CPU_HIGHEST="${GRISTMILL_CPU_HIGHEST:-OFF}" >"$build.log" 2>&1 || { cat "$build.log" >&2; exit 1; }
cmake --build "$build" --parallel "${JOBS:-2}" >"$build.log" 2>&1 || { cat "$build.log" >&2; exit 1; }
export ASAN_OPTIONS=detect_leaks=1:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1
# A program says "runs gm_<op>__<level>" or "cannot run gm_<op>__<level>" (this processor lacks the level), and what it did.
: >"$build.ran"
for program in "$build"/*_asan; do
  "$program" >>"$build.ran"
done
grep -v '__' "$build.ran"

# What was built: a kernel that no program calls, or not at some level, would pass unseen.
find "$build" -name '*.o' -path '*gm_cpu_*' -exec nm {} + | sed -n 's/^[0-9a-f]* T \(gm_[a-z0-9_]*__[a-z0-9_]*\)$/\1/p' | sort -u >"$build.built"
missing=$(sed -n 's/^\(runs\|cannot run\) //p' "$build.ran" | sort -u | comm -23 "$build.built" -)
if [ -n "$missing" ]; then
  printf 'no sanitizer program calls %s: see tests/native/rms_norm_asan.cpp\n' $missing >&2
  exit 1
fi
echo "sanitizers: $(grep -c '^runs' "$build.ran") of $(wc -l <"$build.built") entries ran clean, \
$(grep -c '^cannot run' "$build.ran") are for other processors"
