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
root=$PWD
cd "$work"
unset PYTHONPATH
"$work/venv/bin/python" -P "$root/ci/wheel_smoke.py" "$site"
