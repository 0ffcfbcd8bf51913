#!/bin/sh
# deploy/quickstart.sh in a fresh minimal Debian, timed: packages, build, daemon, first kept tokens.
#
# usage: quickstart.sh [--tests]     --tests: then tests/run.sh in the same root, which takes much longer
#
# Needs root and debootstrap. Making the root itself is not counted. Not part of tests/run.sh.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
project=$(cd "$here/../.." && pwd)
. "$here/root.sh"
needs debootstrap
limit_s=600

work=$(mktemp -d /var/tmp/dropkvd-quickstart.XXXXXX)
root=$work/root
clean_up() {
    status=$?
    for mount in dev/shm proc; do
        umount "$root/$mount" 2>/dev/null || true
    done
    rm -rf "$work"
    exit "$status"
}
trap clean_up EXIT
make_root "$root"
no_services "$root"
mount -t proc proc "$root/proc"
mkdir -p "$root/dev/shm"
mount -t tmpfs tmpfs "$root/dev/shm"
mkdir "$root/root/dropkvd"
git -C "$project" archive HEAD | tar -x -C "$root/root/dropkvd"

started=$(date +%s)
in_root "$root" sh -c 'cd /root/dropkvd && sh deploy/quickstart.sh' >"$work/log" 2>&1 || {
    tail -n 40 "$work/log"
    echo "quickstart: failed" >&2
    exit 1
}
took_s=$(($(date +%s) - started))
tail -n 8 "$work/log"
[ "$(grep -c '^layers\.[0-5] ' "$work/log")" -eq 6 ] || { echo "quickstart: no table of six layers" >&2; exit 1; }
echo "quickstart: $took_s s from a bare system to kept tokens"
[ "$took_s" -lt $limit_s ] || { echo "quickstart: over $limit_s s" >&2; exit 1; }

if [ "${1:-}" = --tests ]; then
    started=$(date +%s)
    in_root "$root" sh -c 'cd /root/dropkvd && sh tests/run.sh'
    echo "tests: $(($(date +%s) - started)) s"
fi
