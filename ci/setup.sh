#!/bin/bash
# Make the virtual environment, install by the constraints, and install gristmill in place with its native libraries.
#   ci/setup.sh PYTHON VENV CONSTRAINTS STAMP [TORCH_SPEC]
set -euo pipefail
python=$1 venv=$2 constraints=$3 stamp=$4 torch_spec=${5:-}

fail() {
  echo "gristmill set-up: $*" >&2
  exit 1
}

[ -f "$constraints" ] || fail "CONSTRAINTS=$constraints does not exist"
command -v "$python" >/dev/null || fail "no $python; install Python 3.11 or newer, or name one with PYTHON="
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$("$python" --version) is too old; 3.11 or newer is needed (PYTHON=)"
"$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python has no venv module; on Debian: apt install python3-venv"
command -v "${CXX:-g++}" >/dev/null || fail "no C++ compiler (${CXX:-g++}); on Debian: apt install g++"

# On a terminal pip shows its progress; in a log only errors matter.
quiet=(-qq)
if [ -t 1 ]; then quiet=(); fi

step() { echo "gristmill set-up: $*"; }

if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  step "virtual environment in $venv"
  "$python" -m venv --clear "$venv"
fi
rm -f "$venv"/.setup-*

# TORCH_SPEC replaces the constraints' own line.
pins=$venv/constraints.txt
if [ -n "$torch_spec" ]; then
  { grep -vE '^torch *[=<>~!]' "$constraints" || true; echo "$torch_spec"; } >"$pins"
else
  cp "$constraints" "$pins"
fi

# Requirements are read from pyproject.toml, so that they are written in one place.
step "packages (the first time downloads torch; this takes minutes)"
mapfile -t packages < <("$venv/bin/python" ci/requirements.py dev)
"$venv/bin/python" -m pip install "${quiet[@]}" -c "$pins" "${packages[@]}"

step "native libraries"
# A build tree made by another generator or another environment cannot be reused.
if [ -f build/CMakeCache.txt ] && ! grep -q "^CMAKE_COMMAND:INTERNAL=$venv/" build/CMakeCache.txt; then rm -rf build; fi
PATH=$venv/bin:$PATH "$venv/bin/python" -m pip install "${quiet[@]}" --no-deps --no-build-isolation -e .
cat build/gristmill-cuda.txt
touch "$stamp"
step "done"
