#!/bin/bash
# What the browser tests need, as far as it can be had: Chromium by apt where that is possible, Playwright and axe-core by pip.
# Never fails: the tests name what is missing and skip.
#   ci/browser.sh
set -uo pipefail
cd "$(dirname "$0")/.."
if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null && ! command -v google-chrome >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 ||
      echo "chromium could not be installed"
  else
    echo "no chromium here, and no apt-get to install it with as root"
  fi
fi
if ! python -c 'import playwright, axe_playwright_python' 2>/dev/null; then
  mapfile -t packages < <(python ci/requirements.py browser)
  python -m pip install -q -c ci/constraints.txt "${packages[@]}" || echo "playwright and axe-core could not be installed"
fi
exit 0
