#!/bin/sh
# A Chromium for the tests of the web pages. Does nothing where one is installed; installs Debian's where that is
# possible (apt-get, as root); otherwise says what is missing and lets the tests decide.
set -eu

for name in "${FLMARKET_CHROMIUM:-}" chromium chromium-browser google-chrome; do
    if [ -n "$name" ] && command -v "$name" >/dev/null 2>&1; then
        exit 0
    fi
done
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "Installing chromium for the tests of the web pages …"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get -qq update && apt-get -qq install --yes --no-install-recommends chromium fonts-inter; } >/dev/null \
        && exit 0
fi
echo "No Chromium: the tests of the web pages need one (set FLMARKET_CHROMIUM, or install the package chromium)." >&2
exit 0
