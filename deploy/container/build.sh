#!/bin/sh
# The build stage of the Dockerfile: puts into OUT what the runtime stage takes over, and nothing else.
#
# usage: build.sh OUT CUDA GPU_ARCH       CUDA: enabled | disabled
set -eu
out=$1 cuda=$2 gpu_arch=$3
here=$(cd "$(dirname "$0")" && pwd)
build=/tmp/dropkvd-build
PATH=$PATH:/usr/local/cuda/bin

cd "$here/../.."
meson setup "$build" --prefix=/usr -Dbuildtype=release -Dtests=disabled -Dcuda="$cuda" -Dgpu_arch="$gpu_arch" >/dev/null
ninja -C "$build" --quiet
DESTDIR=$build/installed meson install -C "$build" --no-rebuild --quiet --strip

mkdir -p "$out/usr/bin" "$out/usr/share/dropkvd"
cp "$build/installed/usr/bin/dropkvd" "$build/installed/usr/bin/dropkv-client" "$out/usr/bin/"
for module in "$build"/installed/usr/lib/*/dropkvd/dkv-cuda.so; do
    [ -f "$module" ] || continue
    mkdir -p "$out/$(dirname "${module#"$build/installed"}")"
    cp "$module" "$out/${module#"$build/installed"}"
done

# The packages that hold the libraries they load: asked of the system, as names differ between
# distributions. A library's path may lead through a link that no package owns.
find "$out/usr" -type f \( -perm -100 -o -name '*.so' \) | while read -r file; do
    ldd "$file" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }'
done | sort -u | while read -r library; do
    dpkg -S "$library" 2>/dev/null || dpkg -S "$(readlink -f "$library")" 2>/dev/null ||
        dpkg -S "/usr$library" 2>/dev/null || dpkg -S "${library#/usr}"
done | sed 's/:.*//' | sort -u >"$out/usr/share/dropkvd/packages"
cp "$here/setup.sh" "$out/usr/share/dropkvd/"
