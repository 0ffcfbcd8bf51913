#!/bin/sh
# The Debian packages from source to purge, in a fresh Debian under a real systemd:
#
#   built by deploy/deb.sh (lintian included), installed by apt in a debootstrap root, booted with
#   systemd-nspawn; deb_checks.sh runs in there as the last service of the boot and powers off.
#
# usage: deb.sh [DEBS_DIR]     about two minutes; with DEBS_DIR its packages are taken, not built
#
# Needs root, debootstrap, systemd-nspawn (Debian: systemd-container), and the packages of
# `deploy/packages.sh build deb`. Not part of tests/run.sh.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
project=$(cd "$here/../.." && pwd)
. "$here/root.sh"
needs debootstrap systemd-nspawn

work=$(mktemp -d /var/tmp/dropkvd-deb.XXXXXX)
trap 'rm -rf "$work"' EXIT
debs=${1:-$work/debs}
[ -n "${1:-}" ] || sh "$project/deploy/deb.sh" "$debs"

root=$work/root
make_root "$root"
mkdir -p "$root/root/debs"
cp "$debs"/dropkvd_*.deb "$debs"/dropkv-client_*.deb "$debs"/libdropkv*.deb "$root/root/debs/"
cp "$here/deb_checks.sh" "$project/tests/data/dumps/tiny_dump_n1024.safetensors" "$root/root/"
in_root "$root" sh -c 'apt-get update -qq &&
    apt-get install -y -qq --no-install-recommends systemd-sysv curl /root/debs/*.deb' >"$work/apt.log" 2>&1 ||
    { tail -n 30 "$work/apt.log"; exit 1; }

cat >"$root/etc/systemd/system/checks.service" <<'UNIT'
[Unit]
After=multi-user.target
SuccessAction=poweroff-force
FailureAction=poweroff-force
[Service]
Type=oneshot
ExecStart=/bin/sh /root/deb_checks.sh
StandardOutput=file:/root/checks.log
StandardError=inherit
[Install]
WantedBy=default.target
UNIT
in_root "$root" systemctl enable -q checks.service

timeout 300 systemd-nspawn -q -D "$root" --boot --register=no --keep-unit --private-network \
    --machine="dropkvd-$$" >"$work/console" 2>&1 </dev/null || true
cat "$root/root/checks.log" || { tail -n 40 "$work/console"; exit 1; }
[ "$(tail -n 1 "$root/root/checks.log")" = "deb: every check passed" ] || {
    tail -n 30 "$work/console"
    exit 1
}
