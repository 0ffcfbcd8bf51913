#!/bin/sh
# Runs tritonclient_test.py in a throw-away virtual environment with tritonclient[http] from PyPI.
# Skipped (77) only where PyPI cannot be reached.
#
# usage: tritonclient.sh DROPKVD DROPKV_CLIENT WORK_DIR TEST_DATA
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv=$3/tritonclient-venv
if [ ! -f "$venv/complete" ]; then
    rm -rf "$venv"
    python3 -m venv "$venv" || { echo "skipped: python3 -m venv does not work here"; exit 77; }
    "$venv/bin/pip" install --quiet --disable-pip-version-check 'tritonclient[http]>=2.73' ml_dtypes numpy \
        >"$3/tritonclient-pip.log" 2>&1 || {
        echo "skipped: tritonclient cannot be installed from PyPI:"
        tail -n 2 "$3/tritonclient-pip.log"
        exit 77
    }
    : >"$venv/complete"
fi
exec "$venv/bin/python3" "$here/tritonclient_test.py" "$1" "$2" "$4"
