#!/bin/sh
# Builds for 64-bit Arm and runs what holds for every architecture under qemu's user emulation.
#
# usage: tests/aarch64.sh [BUILD_DIR]
#
# The kernels (both variants that Arm has), conversions, selection, random blocks against the float64
# reference, the codecs, the client's readers, the queue and the configuration. Not: tests that pass
# descriptors, start daemons or race threads, which the emulation cannot do in full, and those that
# take minutes in it. Exit 77: no cross compiler, Arm libraries or qemu here (deploy/packages.sh cross installs them).
set -eu
cd "$(dirname "$0")/.."
build=${1:-build-aarch64}
emulator='qemu-aarch64-static -L /usr/aarch64-linux-gnu'

for program in aarch64-linux-gnu-gcc qemu-aarch64-static; do
    command -v $program >/dev/null 2>&1 || { echo "aarch64: no $program here, skipped"; exit 77; }
done
[ -e /usr/lib/aarch64-linux-gnu/pkgconfig/libmicrohttpd.pc ] || {
    echo "aarch64: no arm64 libraries here, skipped"
    exit 77
}

[ -f "$build/build.ninja" ] || meson setup "$build" --cross-file deploy/cross/aarch64.ini \
    -Dbuildtype=release -Dwerror=true -Dcuda=disabled >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
rm -f "$build.log"

tests='kernels/check_kernels kernels/test_convert kernels/test_select
    proto/test_oip_call proto/test_oip_infer proto/test_oip_meta proto/test_oip_reply
    proto/test_params proto/test_plans proto/test_prompt proto/test_request proto/test_wire proto/test_memfd
    client/test_blocks client/test_npy
    server/test_config server/test_admission server/test_admission_bounds server/test_admission_ends'
# The programs are built as well: that they link is part of the promise.
targets='server/dropkvd client/dropkv-client tests/kernels/check_random'
for test in $tests; do
    targets="$targets tests/$test"
done
# shellcheck disable=SC2086 # lists of words
ninja -C "$build" --quiet $targets

DKV_TEST_DATA=$PWD/tests/data
export DKV_TEST_DATA
# One processor and one thread, so that engines start none: creating and joining them under emulation
# now and then ends in an endless loop inside the C library's list of stacks (qemu 7.2, glibc 2.36).
processor=$(taskset -cp $$ | sed 's/.*: //; s/[,-].*//')
DKV_TEST_THREADS=1
export DKV_TEST_THREADS
passed=0 failed=0
check() {
    if timeout -k 5 300 taskset -c "$processor" $emulator "$@" >"$build/test.log" 2>&1; then
        passed=$((passed + 1))
    else
        echo "aarch64: FAILED $*"
        tail -n 40 "$build/test.log"
        failed=$((failed + 1))
    fi
}
for test in $tests; do
    check "$build/tests/$test"
done
check "$build/tests/kernels/check_random" cpu 16 1
check "$build/client/dropkv-client" score --endpoint embedded: --keep-ratio 0.1 \
    tests/data/dumps/tiny_dump_n1024.safetensors
check "$build/server/dropkvd" --print-config

echo "aarch64: $passed passed, $failed failed"
[ "$failed" -eq 0 ]
