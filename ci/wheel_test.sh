#!/bin/bash
# Build the sdist, and the wheel from the sdist; look inside; install and import from elsewhere. GRISTMILL_FULL=1 builds the wheel from the
# tree too, which compiles everything once more.
# The dependencies come from the calling environment: this tests our packaging, not the network.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
quiet() { "$@" >"$work/log" 2>&1 || { cat "$work/log" >&2; return 1; }; }

quiet python -m build --no-isolation --sdist --outdir "$work/sdist" .
if [ -n "${GRISTMILL_FULL:-}" ]; then
  quiet python -m build --no-isolation --wheel --outdir "$work/tree" .
fi
mkdir "$work/unpacked"
tar -xzf "$work"/sdist/gristmill-*.tar.gz -C "$work/unpacked" --strip-components=1
# A build folder as deep below the sources as the tree's own: ccache then knows the sources.
quiet python -m build --no-isolation --wheel -C build-dir=build --outdir "$work/wheel" "$work/unpacked"
python ci/check_wheel.py "$work"/sdist/gristmill-*.tar.gz "$work"/wheel/*.whl ${GRISTMILL_FULL:+"$work"/tree/*.whl}

python -m venv --without-pip "$work/venv"
site=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
python -m pip install --quiet --no-deps --no-index --target "$site" "$work"/wheel/*.whl
# Ours first, then everybody else's; an editable gristmill there is not looked at, since its own .pth is not processed.
python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/zz-dependencies.pth"
cd "$work"
unset PYTHONPATH
"$work/venv/bin/python" -P - "$site" <<'PY'
import sys
from pathlib import Path

import gristmill

assert Path(gristmill.__file__).is_relative_to(sys.argv[1]), gristmill.__file__
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from gristmill.kernels import native

levels = native.manifest()["cpu_levels"]
arguments = (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_float, c_int)
x, w = torch.ones(2, 9), torch.arange(9.0)
out = torch.empty_like(x)
function = native.cpu_function("gm_rms_norm", levels[0], arguments)
native.check(function(x.data_ptr(), 9, w.data_ptr(), out.data_ptr(), 9, 2, 9, 0.0, 0), "gm_rms_norm")
assert torch.equal(out, w.expand(2, 9)), out
print(f"wheel: gristmill {gristmill.__version__} imports and runs from {Path(gristmill.__file__).parent.name}, levels {' '.join(levels)}")
PY
