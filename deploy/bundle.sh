#!/bin/sh
# Makes a folder that runs on any Linux host with at least this host's glibc: programs, the CUDA
# engine, and the shared libraries they need beside them. No root, no packages, no installation.
#
# usage: deploy/bundle.sh BUILD_DIR OUT_DIR [--tests]
#
#   OUT/bin/NAME    what to call: dropkvd, dropkv-client (with --tests also the GPU tests)
#   OUT/programs    the programs themselves and dkv-cuda.so, which is looked for beside them
#   OUT/lib         shared libraries other than glibc's and the driver's
#   OUT/data        with --tests: the tests' data; run.sh beside it
#   OUT/python      with --tests: those that need Python 3
set -eu
[ $# -ge 2 ] || { echo "usage: $0 BUILD_DIR OUT_DIR [--tests]" >&2; exit 64; }
build=$1 out=$2 tests=${3:-}
root=$(cd "$(dirname "$0")/.." && pwd)

mkdir -p "$out/bin" "$out/programs" "$out/lib"

# glibc and the loader must be the host's own; libcuda comes with its driver.
is_system() {
    case $1 in
    libc.so.* | libm.so.* | libdl.so.* | librt.so.* | libpthread.so.* | libresolv.so.* | ld-linux* | \
        libcuda.so.* | linux-vdso.so.*) return 0 ;;
    esac
    return 1
}

add_libraries() {
    ldd "$1" | awk '$2 == "=>" && $3 ~ /^\// { print $1, $3 }' | while read -r name path; do
        is_system "$name" || [ -e "$out/lib/$name" ] || cp -L "$path" "$out/lib/$name"
    done
}

add_program() {
    [ -f "$1" ] || return 0
    name=$(basename "$1")
    cp "$1" "$out/programs/$name"
    strip --strip-unneeded "$out/programs/$name"
    add_libraries "$1"
    cat >"$out/bin/$name" <<'WRAPPER'
#!/bin/sh
here=$(cd "$(dirname "$(readlink -f "$0")")/.." && pwd)
LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
exec "$here/programs/$(basename "$0")" "$@"
WRAPPER
    chmod 755 "$out/bin/$name"
}

add_program "$build/server/dropkvd"
add_program "$build/client/dropkv-client"
add_program "$build/client/cli/dropkv-client"
if [ -f "$build/kernels/cuda/dkv-cuda.so" ]; then
    cp "$build/kernels/cuda/dkv-cuda.so" "$out/programs/"
    add_libraries "$build/kernels/cuda/dkv-cuda.so"
fi
if [ "$tests" = --tests ]; then
    for program in "$build"/tests/gpu/* "$build"/tests/bench/* "$build"/tests/kernels/*; do
        [ -x "$program" ] && [ -f "$program" ] && add_program "$program"
    done
    mkdir -p "$out/data" "$out/python"
    cp "$root"/tests/gpu/*.py "$root"/tests/server/daemon.py "$root"/tests/server/socket_daemon.py \
        "$root"/tests/server/wire.py "$out/python/"
    cp -r "$root/tests/data/." "$out/data/"
    cp "$root/tests/gpu/run.sh" "$root/tests/gpu/race_summary.sh" "$root/tests/gpu/race_known.txt" \
        "$out/"
fi
echo "bundle: $(du -sh "$out" | cut -f1) in $out"
