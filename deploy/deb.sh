#!/bin/sh
# Builds the Debian packages of this tree (as it is committed) with dpkg-buildpackage, and checks them
# with lintian, of which an error or a warning fails the build.
#
# usage: deploy/deb.sh OUT_DIR [--cuda] [--arch arm64]
#
#   --cuda   also dropkvd-cuda, which needs nvcc. GPU_ARCH=90a,100 in the environment compiles for these
#            alone; without it for all that the toolkit knows, which takes minutes.
#   --arch   cross-builds; needs also the packages of `deploy/packages.sh cross` and libcairo2-dev:arm64.
#
# Needs the packages of `deploy/packages.sh build deb`.
set -eu
usage="usage: $0 OUT_DIR [--cuda] [--arch arm64]"
[ $# -ge 1 ] || { echo "$usage" >&2; exit 64; }
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
profile='' cross=''
while [ $# -gt 0 ]; do
    case "$1 ${2:-}" in
    --cuda\ *) profile="$profile pkg.dropkvd.cuda" ;;
    # -d: the build's own tools are this machine's, which dpkg would look for in that architecture
    --arch\ arm64) profile="$profile cross" cross="-aarm64 -d"; shift ;;
    *) echo "$usage" >&2; exit 64 ;;
    esac
    shift
done

for tool in dpkg-buildpackage dh lintian; do
    command -v $tool >/dev/null || { echo "deb.sh: $tool is missing: sh deploy/packages.sh build deb" >&2; exit 69; }
done
version=$(sed -n "s/^ *version: '\([0-9.]*\)',$/\1/p" "$root/meson.build")
packaged=$(dpkg-parsechangelog -l "$root/deploy/debian/changelog" -S Version)
[ "$version" = "$packaged" ] || {
    echo "deb.sh: meson.build says version $version, deploy/debian/changelog $packaged" >&2
    exit 1
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
source=$work/dropkvd-$version
mkdir "$source"
# The committed tree, so that what is built can be told by a commit. Outside of git: all there is.
if git -C "$root" rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git -C "$root" archive HEAD | tar -x -C "$source"
else
    tar -C "$root" --exclude='./build*' --exclude=./.git -c . | tar -x -C "$source"
fi
mv "$source/deploy/debian" "$source/debian"

# shellcheck disable=SC2086 # no word or two
(cd "$source" && DEB_BUILD_PROFILES=$profile dpkg-buildpackage $cross --build=binary --no-sign) >"$work/log" 2>&1 || {
    tail -n 60 "$work/log"
    exit 1
}
cp "$work"/*.deb "$work"/*.changes "$work"/*.buildinfo "$out"
lintian --allow-root --fail-on error,warning --tag-display-limit 0 "$work"/*.changes
echo "packages: in $out"
