#!/bin/sh
# Runs the GPU tests on a host that has nothing of ours installed, from a bundle.
#
# usage: run.sh [BUNDLE_DIR] [--quick] [--sanitize] [--bench]     (deploy/bundle.sh BUILD DIR --tests)
#
#   --quick      a tenth of the random cases
#   --sanitize   compute-sanitizer: memcheck, initcheck, synccheck on a few dozen cases, racecheck on
#                some; its output goes to RACECHECK_LOGS (BUNDLE_DIR/logs), and is each byte's hazard
#                with RACECHECK_REPORT=all, not each pair of accesses alone
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

run "$dir/bin/test_gpu_engine"
run "$dir/bin/bench_select" check 200
# The tests that take the name of an engine, on this one.
for test in budgets extremes golden layouts metamorphic nasty same_bits; do
    run "$dir/bin/test_$test" cuda:0
done
# Each scorer that uses the tensor cores against float64 on the device.
for scorer in fast stream stream-16bit stream-fp8; do
    run timeout 300 "$dir/bin/bench_fast" check "" 2 $scorer
done
# Its threads are late on purpose: what relies on being quick hangs or differs.
run timeout 300 "$dir/bin/check_fast_shaken" check llama 10
run "$dir/bin/check_random" cuda:0 300 1
run "$dir/bin/check_policies" cuda:0 300 3300
run "$dir/bin/check_gpu_policies" 512
# The same engine behind the library's calls, on streams of the caller's.
run "$dir/bin/test_gpu_embedded"
# Memory of other processes, lent to a daemon.
run "$dir/bin/test_gpu_export" "$dir/bin/dropkvd"
if command -v python3 >/dev/null; then
    for test in test_gpu_regions test_gpu_deaths test_two_gpus; do
        run python3 -B "$dir/python/$test.py" "$dir/bin/dropkvd"
    done
else
    echo "skipped: what is written in Python: no python3"
fi
# The reference is slow and on the CPU: several processes share the cases, and the GPU.
jobs=$(nproc)
[ "$jobs" -gt 12 ] && jobs=12
echo "== check_gpu_random: $cases cases in $jobs processes"
each=$(((cases + jobs - 1) / jobs))
logs=$(mktemp -d)
pids=
for job in $(seq "$jobs"); do
    "$dir/bin/check_gpu_random" "$each" $((job * 1000000)) 1 >"$logs/$job" 2>&1 &
    pids="$pids $!"
done
for pid in $pids; do
    wait "$pid"
    rc=$?
    [ $rc -eq 77 ] && { cat "$logs/1"; echo "no usable GPU"; exit 77; }
    [ $rc -eq 0 ] || failed=1
done
grep -h -E "^seed|^batch|tests:" "$logs"/* | head -n 40
grep -h "worst" "$logs"/* | sort | awk '{ m[$1] = m[$1] > $4+0 ? m[$1] : $4+0; x[$1] = x[$1] > $7+0 ? x[$1] : $7+0 }
    END { for (t in m) print t, "worst median", m[t], "worst maximum", x[t] }'
awk -v want="$cases" '/ cases: /{ c += $1; f += $(NF-1) }
    END { print c + 0, "cases,", f + 0, "failures"; exit c < want || f > 0 }' "$logs"/* || failed=1
rm -rf "$logs"
# What racecheck says is kept whole, a file for each program, and counted here by where the two
# accesses are. It cannot see every order: the hand-overs that it reports by themselves, each in a
# kernel of a few lines that is right, are found first; whatever else it reports is a failure. The
# seeds are one for each kernel that scores: the general one and fp8, then 32 and 64 rows, fp8 with
# 64, and two of the stream scorer; policies bring the others.
racecheck_log() {
    LD_LIBRARY_PATH=$dir/lib timeout 900 compute-sanitizer --tool racecheck --error-exitcode 1 \
        --racecheck-report "${RACECHECK_REPORT:-analysis}" --print-limit 0 --demangle simple \
        --log-file "$1" "$dir/programs/$2" ${3+"$3"} ${4+"$4"}
}

find_reported_patterns() {
    reported=
    for pattern in $("$dir/bin/race_patterns" names); do
        if racecheck_log "$logs/pattern-$pattern.log" race_patterns "$pattern" >/dev/null; then
            echo "not reported by itself: $pattern"
        else
            echo "reported by itself: $pattern"
            reported="$reported $pattern"
        fi
    done
    case $reported in
    *no_order*) ;;
    *) echo "FAILED: racecheck does not report a race"; failed=1 ;;
    esac
}

racecheck() {
    log=$logs/racecheck-$1-$2-$3.log
    echo "== racecheck $1 $2 $3: $log"
    racecheck_log "$log" "$@"
    sh "$dir/race_summary.sh" "$log" "$dir/race_known.txt" "$reported" ||
        { echo "FAILED: racecheck $1 $2 $3"; failed=1; }
    grep -q "RACECHECK SUMMARY" "$log" || { echo "FAILED: racecheck $1 $2 $3 did not end"; failed=1; }
}

if $sanitize; then
    for tool in memcheck initcheck synccheck; do
        LD_LIBRARY_PATH=$dir/lib run compute-sanitizer --tool $tool --error-exitcode 1 \
            "$dir/programs/check_gpu_random" 48 7
    done
    logs=${RACECHECK_LOGS:-$dir/logs}
    mkdir -p "$logs"
    run "$dir/bin/race_patterns"
    find_reported_patterns
    racecheck check_gpu_random 8 7
    for seed in 63 292 104 19 83; do
        racecheck check_gpu_random 1 $seed
    done
    racecheck check_gpu_policies 8 1
fi
$bench && run "$dir/bin/bench_cuda"
$bench && run "$dir/bin/bench_gpu_ipc" "$dir/bin/dropkvd"
[ $failed -eq 0 ] && echo "GPU tests: all passed"
exit $failed
