#!/bin/sh
# Installs the Debian or Ubuntu packages that the project needs, where they are missing.
#
# usage: packages.sh build|test|deb|extra|cross...
#
#   cross   compiler, libraries and emulator for 64-bit Arm; on Debian amd64 alone, which gets arm64 as
#           a second architecture
#
# Nothing is touched when everything is there, so it works without network and without root then.
set -eu

build_packages="gcc libc6-dev meson ninja-build pkg-config libmicrohttpd-dev libuv1-dev
    libjansson-dev libcurl4-openssl-dev libpopt-dev libcairo2-dev"
test_packages="g++ clang libclang-rt-14-dev clang-format libcmocka-dev python3 python3-venv mandoc jq curl haproxy"

# Tests that skip without them: a browser for the status page, promtool for the metrics. Installing
# prometheus starts it as a service where there is systemd.
extra_packages="chromium prometheus"

deb_packages="debhelper dpkg-dev lintian debootstrap systemd-container buildah"

cross_packages="gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static libmicrohttpd-dev:arm64
    libuv1-dev:arm64 libjansson-dev:arm64 libcurl4-openssl-dev:arm64 libpopt-dev:arm64
    libcmocka-dev:arm64"

wanted=
for group in "$@"; do
    case $group in
    build) wanted="$wanted $build_packages" ;;
    test) wanted="$wanted $test_packages" ;;
    deb) wanted="$wanted $deb_packages" ;;
    extra) wanted="$wanted $extra_packages" ;;
    cross) wanted="$wanted $cross_packages" ;;
    *) echo "packages.sh: unknown group '$group': build, test, deb, extra or cross" >&2; exit 64 ;;
    esac
done

command -v dpkg-query >/dev/null 2>&1 || {
    echo "packages.sh: this is not Debian or Ubuntu; install the equivalents of:" $wanted >&2
    exit 69
}

installed() {
    # one line for each architecture that has it
    dpkg-query -W -f='${db:Status-Status}\n' "$1" 2>/dev/null | grep -qx installed
}

missing=
for package in $wanted; do
    installed "$package" || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

as_root=
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null 2>&1 || {
        echo "packages.sh: these packages are missing, and there is no sudo to install them:$missing" >&2
        exit 77
    }
    as_root=sudo
fi

echo "installing:$missing"
export DEBIAN_FRONTEND=noninteractive
case $missing in *:arm64*)
    # Ubuntu keeps arm64 on other servers, which its sources would have to name.
    . /etc/os-release
    [ "$ID" = debian ] && [ "$(dpkg --print-architecture)" = amd64 ] || {
        echo "packages.sh: cross needs Debian on amd64" >&2
        exit 69
    }
    $as_root dpkg --add-architecture arm64 ;;
esac
$as_root apt-get update -qq
# The sanitizers' runtime bears the version of the distribution's clang.
case $missing in *libclang-rt-14-dev*)
    apt-cache show libclang-rt-14-dev >/dev/null 2>&1 || {
        clang_version=$(apt-cache depends clang | sed -n 's/.*Depends: clang-\([0-9]*\)$/\1/p' | head -n 1)
        missing=$(echo "$missing" | sed "s/libclang-rt-14-dev/libclang-rt-$clang_version-dev/")
    } ;;
esac
# shellcheck disable=SC2086 # a list of words
$as_root apt-get install -y -qq --no-install-recommends $missing >/dev/null
