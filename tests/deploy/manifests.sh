#!/bin/sh
# The Kubernetes manifests and the compose files. The former are rendered by kustomize where kubectl is there
# and validated against Kubernetes' own schemas (kubernetes-validate from PyPI); both are checked against
# the tree and the daemon (check_kubernetes.py, check_compose.py).
#
# usage: manifests.sh FOLDER DROPKVD WORK_DIR       FOLDER: deploy/kubernetes/base
set -eu
here=$(cd "$(dirname "$0")" && pwd)
base=$1 program=$(realpath "$2") venv=$3/manifests-venv
if [ ! -f "$venv/complete" ]; then
    rm -rf "$venv"
    python3 -m venv "$venv" || { echo "skipped: python3 -m venv does not work here"; exit 77; }
    "$venv/bin/pip" install --quiet --disable-pip-version-check 'kubernetes-validate>=1.33' pyyaml \
        >"$3/manifests-pip.log" 2>&1 || {
        echo "skipped: kubernetes-validate cannot be installed from PyPI:"
        tail -n 2 "$3/manifests-pip.log"
        exit 77
    }
    : >"$venv/complete"
fi
rendered=$(mktemp)
trap 'rm -f "$rendered"' EXIT
if command -v kubectl >/dev/null && kubectl kustomize "$base" >"$rendered" 2>/dev/null; then
    echo "rendered by kubectl kustomize"
else
    echo "not rendered: no kubectl; the files are checked one by one"
    : >"$rendered"
fi
"$venv/bin/python3" -B "$here/check_kubernetes.py" "$base" "$program" "$rendered"
"$venv/bin/python3" -B "$here/check_compose.py" "$base/../../compose" "$program"
