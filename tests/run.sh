#!/bin/sh
# The one test command: installs what the tests need, builds, runs everything.
#
# usage: tests/run.sh [--quick]
#
#   release    gcc, warnings are errors, with the CUDA engine where nvcc is found (for two GPU
#              architectures: the full list is for releases and takes minutes more)
#   clang      the same tree with clang, warnings are errors (compiled without optimization, not run again)
#   sanitize   ASan, UBSan and LSan, without the CUDA engine
#   aarch64    cross-built, part of the tests under qemu (tests/aarch64.sh)
#
# Many tests wait more than they compute, so clang and sanitize are built beside the release's tests, and
# aarch64 is built and run beside the sanitized ones.
#
# --quick stops after release. Exit 0: everything that ran has passed; what was skipped is listed.
set -eu
cd "$(dirname "$0")/.."
root=$PWD
started=$(date +%s)

quick=false
case "${1:-}" in
'') ;;
--quick) quick=true ;;
*) echo "usage: tests/run.sh [--quick]" >&2; exit 64 ;;
esac

sh deploy/packages.sh build test

PATH=$PATH:/usr/local/cuda/bin
cuda=disabled
if command -v nvcc >/dev/null 2>&1; then
    cuda=enabled
fi

passed=0 failed=0 skipped=0

# configure DIR MESON_OPTION...: a fresh or an existing build directory with exactly these options.
configure() {
    dir=$1
    shift
    if [ -f "$dir/build.ninja" ]; then
        meson configure "$dir" "$@" >/dev/null
    else
        rm -rf "$dir"
        meson setup "$dir" "$@" >"$dir.log" 2>&1 || { cat "$dir.log"; exit 1; }
        rm -f "$dir.log"
    fi
}

# run_suite DIR NAME: meson test, its counts added up, its failures shown.
run_suite() {
    dir=$1 name=$2
    echo "== $name: tests"
    log=$dir/run-tests.log
    meson test -C "$dir" --no-rebuild --print-errorlogs --timeout-multiplier "${DKV_TIMEOUT_MULTIPLIER:-2}" \
        >"$log" 2>&1 || true
    grep -E '^ *[0-9]+/[0-9]+ .*(FAIL|TIMEOUT|SKIP|ERROR|UNEXPECTED)' "$log" || true
    ok=$(sed -n 's/^Ok: *\([0-9]*\).*/\1/p' "$log")
    bad=$(sed -n -e 's/^Fail: *\([0-9]*\).*/\1/p' -e 's/^Timeout: *\([0-9]*\).*/\1/p' \
        -e 's/^Unexpected Pass: *\([0-9]*\).*/\1/p' "$log" | awk '{ s += $1 } END { print s + 0 }')
    out=$(sed -n 's/^Skipped: *\([0-9]*\).*/\1/p' "$log")
    if [ -z "$ok" ] || [ "$bad" -ne 0 ]; then
        tail -n 150 "$log"
        [ -n "$ok" ] || bad=1
    fi
    echo "   $name: ${ok:-0} ok, $bad failed, ${out:-0} skipped"
    passed=$((passed + ${ok:-0})) failed=$((failed + bad)) skipped=$((skipped + ${out:-0}))
}

# build_others: what the release's tests do not need.
build_others() {
    (CC=clang; export CC
    configure build-clang -Dbuildtype=debug -Ddebug=false -Dwerror=true -Dcuda=disabled)
    nice ninja -C build-clang --quiet
    # An error ends the program (UBSAN_OPTIONS below), so the code to go on after one can be spared.
    configure build-asan -Dbuildtype=debugoptimized -Dwerror=true -Dcuda=disabled \
        -Db_sanitize=address,undefined -Dc_args=-fno-sanitize-recover=all
    nice ninja -C build-asan --quiet
}

beside=
stop_beside() {
    [ -n "$beside" ] || return 0
    pkill -P "$beside" 2>/dev/null || true
    kill "$beside" 2>/dev/null || true
}
trap stop_beside EXIT
trap 'exit 130' INT TERM

echo "== release: build (cuda $cuda)"
configure build -Dbuildtype=release -Dwerror=true -Dcuda=$cuda -Dgpu_arch=80,90a
ninja -C build --quiet
if ! $quick; then
    build_others >build/others.log 2>&1 &
    beside=$!
fi
run_suite build release

if ! $quick; then
    echo "== clang, sanitize: build"
    wait "$beside" || { beside=; cat build/others.log; exit 1; }
    sh tests/aarch64.sh build-aarch64 >build/aarch64.log 2>&1 &
    beside=$!
    ASAN_OPTIONS=detect_leaks=1:abort_on_error=1:strict_string_checks=1
    # What fontconfig, behind cairo, keeps until the process ends.
    LSAN_OPTIONS=suppressions=$root/tests/lsan.supp:print_suppressions=0
    UBSAN_OPTIONS=halt_on_error=1:abort_on_error=1:print_stacktrace=1
    DKV_SANITIZED=1
    export ASAN_OPTIONS LSAN_OPTIONS UBSAN_OPTIONS DKV_SANITIZED
    run_suite build-asan sanitize

    echo "== aarch64: build, and tests under emulation"
    wait "$beside" && rc=0 || rc=$?
    beside=
    cat build/aarch64.log
    case $rc in
    0) passed=$((passed + 1)) ;;
    77) skipped=$((skipped + 1)) ;;
    *) failed=$((failed + 1)) ;;
    esac
fi

echo "took $(($(date +%s) - started)) s in $root" >&2
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
