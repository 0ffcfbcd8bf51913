# Sourced by the tests that work in a fresh Debian root. Nothing here runs by itself.
#
#   make_root DIR    a minimal Debian of this host's kind in DIR, with this host's way to the packages
#   in_root DIR COMMAND...
#
# debootstrap's result is kept in $DKV_BASE_ROOT (default /var/tmp/dropkvd-base-SUITE) and copied.

DKV_SUITE=${DKV_SUITE:-bookworm}
DKV_BASE_ROOT=${DKV_BASE_ROOT:-/var/tmp/dropkvd-base-$DKV_SUITE}
DKV_MIRROR=${DKV_MIRROR:-http://deb.debian.org/debian}

needs() {
    [ "$(id -u)" -eq 0 ] || { echo "skipped: needs root"; exit 77; }
    for tool in "$@"; do
        command -v "$tool" >/dev/null || { echo "skipped: $tool is not installed"; exit 77; }
    done
}

make_root() {
    if [ ! -f "$DKV_BASE_ROOT/etc/debian_version" ]; then
        rm -rf "$DKV_BASE_ROOT.new"
        debootstrap --variant=minbase "$DKV_SUITE" "$DKV_BASE_ROOT.new" "$DKV_MIRROR" >"$DKV_BASE_ROOT.log" 2>&1 || {
            tail -n 5 "$DKV_BASE_ROOT.log"
            echo "skipped: debootstrap did not work here"
            exit 77
        }
        mv "$DKV_BASE_ROOT.new" "$DKV_BASE_ROOT"
    fi
    mkdir -p "$1"
    cp -a "$DKV_BASE_ROOT/." "$1"
    # A host may reach its packages through a proxy, a mirror or a certificate of its own.
    for file in /etc/resolv.conf /etc/hosts /etc/ssl/certs/ca-certificates.crt; do
        [ ! -f "$file" ] || { mkdir -p "$1$(dirname "$file")"; cp -L "$file" "$1$file"; }
    done
    for file in $(grep -lsE 'Acquire::|Proxy' /etc/apt/apt.conf /etc/apt/apt.conf.d/* || true); do
        cp "$file" "$1/etc/apt/apt.conf.d/"
    done
}

# Keeps services from being started by their packages: nobody is there to run them.
no_services() {
    printf '#!/bin/sh\nexit 101\n' >"$1/usr/sbin/policy-rc.d"
    chmod 755 "$1/usr/sbin/policy-rc.d"
}

in_root() {
    root=$1
    shift
    env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
        DEBIAN_FRONTEND=noninteractive chroot "$root" "$@"
}
