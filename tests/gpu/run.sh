#!/bin/sh
# Runs the GPU tests on a host that has nothing of ours installed, from a bundle.
#
# usage: run.sh [BUNDLE_DIR] [--quick] [--sanitize] [--bench]     (deploy/bundle.sh BUILD DIR --tests)
#
#   --quick      a tenth of the random cases
#   --sanitize   compute-sanitizer: memcheck, racecheck, initcheck, synccheck on a few dozen cases
#   --bench      the benchmark as well
#
# Exit 0: everything passed; 77: no usable GPU; 1: something failed.
set -u
dir=$(cd "$(dirname "$0")" && pwd)
cases=10000 sanitize=false bench=false
for arg in "$@"; do
    case $arg in
    --quick) cases=1000 ;;
    --sanitize) sanitize=true ;;
    --bench) bench=true ;;
    *) dir=$(cd "$arg" && pwd) ;;
    esac
done
DKV_TEST_DATA=$dir/data
export DKV_TEST_DATA
failed=0

run() {
    echo "== $*"
    "$@"
    rc=$?
    [ $rc -eq 77 ] && { echo "no usable GPU"; exit 77; }
    [ $rc -eq 0 ] || { echo "FAILED ($rc): $*"; failed=1; }
}

run "$dir/bin/check_random" "$cases" 1
for test in "$dir"/bin/test_gpu_*; do
    [ -x "$test" ] && run "$test"
done
if $sanitize; then
    for tool in memcheck racecheck initcheck synccheck; do
        LD_LIBRARY_PATH=$dir/lib run compute-sanitizer --tool $tool --error-exitcode 1 \
            "$dir/programs/check_random" 48 7
    done
fi
$bench && run "$dir/bin/bench_cuda"
[ $failed -eq 0 ] && echo "GPU tests: all passed"
exit $failed
