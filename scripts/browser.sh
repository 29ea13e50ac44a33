#!/usr/bin/env bash
# A Chromium for the tests of the page (torchtitan_rl.view): nothing else needs one.
set -euo pipefail
command -v "${TORCHTITAN_RL_BROWSER:-chromium}" chromium-headless-shell chromium-browser \
  google-chrome chrome >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing Chromium, for the tests of the page ..."
  apt-get update -qq >/dev/null 2>&1 || true
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium >/dev/null && exit 0
fi
echo "no Chromium found, which the tests of the page need: install it (Debian, Ubuntu: apt-get install" \
  "chromium), or name the executable of one in TORCHTITAN_RL_BROWSER" >&2
exit 1
