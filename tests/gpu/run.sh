#!/bin/sh
# Runs the GPU tests on a host that has nothing of ours installed, from a bundle.
#
# usage: run.sh [BUNDLE_DIR] [--quick] [--sanitize] [--bench]     (deploy/bundle.sh BUILD DIR --tests)
#
#   --quick      a tenth of the random cases
#   --sanitize   compute-sanitizer: memcheck, initcheck, synccheck and racecheck on a few dozen cases;
#                racecheck's hazards are each byte's with RACECHECK_REPORT=all, not each pair of accesses alone
#   --bench      the benchmark as well, when everything else has ended
#
# The references are slow and on the CPU, so what waits for them runs beside the rest. Each program's
# output is a file of GPU_TEST_LOGS (BUNDLE_DIR/logs); here it is shown when it has ended.
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
logs=${GPU_TEST_LOGS:-$dir/logs}
mkdir -p "$logs"
rm -f "$logs"/*.log "$logs"/*.rc
failed=0
all=

# finish NAME PROGRAM..: leaves NAME.log and NAME.rc.
finish() {
    name=$1
    shift
    timeout "${GPU_TEST_LIMIT:-1800}" "$@" >"$logs/$name.log" 2>&1
    echo $? >"$logs/$name.rc"
}

# start NAME PROGRAM..: beside what follows. It may take as long as the slowest of them, on few cores.
start() {
    all="$all $1"
    finish "$@" &
}

# run NAME PROGRAM..: alone among those that are not beside.
run() {
    all="$all $1"
    finish "$@"
}

# Shows what ended badly whole, of the others the last line.
report() {
    for name in $all; do
        rc=$(cat "$logs/$name.rc" 2>/dev/null || echo none)
        case $rc in
        0) echo "== $name: $(tail -n 1 "$logs/$name.log")" ;;
        77) echo "== $name: skipped: $(tail -n 1 "$logs/$name.log")" ;;
        *)
            echo "== $name: FAILED ($rc)"
            tail -n 60 "$logs/$name.log"
            failed=1
            ;;
        esac
    done
    all=
}

run test_gpu_engine "$dir/bin/test_gpu_engine"
[ "$(cat "$logs/test_gpu_engine.rc")" -ne 77 ] || { cat "$logs/test_gpu_engine.log"; exit 77; }

# ---- what waits for a reference ----

jobs=$(nproc)
[ "$jobs" -gt 12 ] && jobs=12
each=$(((cases + jobs - 1) / jobs))
for job in $(seq "$jobs"); do
    start "random-$job" "$dir/bin/check_gpu_random" "$each" $((job * 1000000)) 1
done
start check_gpu_policies "$dir/bin/check_gpu_policies" 512
start check_policies "$dir/bin/check_policies" cuda:0 300 3300
start check_random "$dir/bin/check_random" cuda:0 300 1

# ---- compute-sanitizer ----

# What racecheck says is kept whole, a file for each program, and counted by where the two accesses
# are. It cannot see every order: the hand-overs that it reports by themselves, each in a kernel of a
# few lines that is right, are found first; whatever else it reports is a failure. The seeds are one
# for each kernel that scores: the general one and fp8, then 32 and 64 rows, fp8 with 64, and two of
# the stream scorer; policies bring the others.
race_programs="check_gpu_random-8-7 check_gpu_random-1-63 check_gpu_random-1-292 check_gpu_random-1-104
    check_gpu_random-1-19 check_gpu_random-1-83 check_policies-cuda:0-12-3300"

# start_racecheck NAME PROGRAM..: NAME.rc is 99 if something was reported.
start_racecheck() {
    race=$1
    shift
    start "race-$race" compute-sanitizer --tool racecheck --error-exitcode 99 \
        --racecheck-report "${RACECHECK_REPORT:-analysis}" --print-limit 0 --demangle simple \
        --log-file "$logs/race-$race.txt" "$@"
    all=${all% *} # judged below
}

if $sanitize; then
    LD_LIBRARY_PATH=$dir/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export LD_LIBRARY_PATH
    for tool in memcheck initcheck synccheck; do
        start "$tool" compute-sanitizer --tool $tool --error-exitcode 1 \
            "$dir/programs/check_gpu_random" 24 7
    done
    run race_patterns "$dir/bin/race_patterns"
    for pattern in $("$dir/bin/race_patterns" names); do
        start_racecheck "$pattern" "$dir/programs/race_patterns" "$pattern"
    done
    for program in $race_programs; do
        # shellcheck disable=SC2046 # NAME-ARGUMENT-ARGUMENT
        start_racecheck "$program" "$dir/programs/"$(echo "$program" | tr '-' ' ')
    done
fi

# ---- the rest, one after the other ----

# The tests that take the name of an engine, on this one.
for test in budgets extremes golden layouts metamorphic nasty same_bits; do
    run "test_$test" "$dir/bin/test_$test" cuda:0
done
# Each scorer that uses the tensor cores against float64 on the device.
for scorer in fast stream stream-16bit stream-256 stream-fp8; do
    run "check-$scorer" "$dir/bin/bench_fast" check "" 2 $scorer
done
run bench_select "$dir/bin/bench_select" check 200
# Its threads are late on purpose: what relies on being quick hangs or differs.
run check_fast_shaken "$dir/bin/check_fast_shaken" check llama 4
# The same engine behind the library's calls, on streams of the caller's.
run test_gpu_embedded "$dir/bin/test_gpu_embedded"
# Memory of other processes, lent to a daemon.
run test_gpu_export "$dir/bin/test_gpu_export" "$dir/bin/dropkvd"
if command -v python3 >/dev/null; then
    for test in test_gpu_regions test_gpu_deaths test_two_gpus; do
        run "$test" python3 -B "$dir/python/$test.py" "$dir/bin/dropkvd"
    done
else
    echo "skipped: what is written in Python: no python3"
fi

wait
report

if $sanitize; then
    reported=
    for pattern in $("$dir/bin/race_patterns" names); do
        case $(cat "$logs/race-$pattern.rc") in
        0) echo "not reported by itself: $pattern" ;;
        99)
            echo "reported by itself: $pattern"
            reported="$reported $pattern"
            ;;
        *) echo "FAILED: race_patterns $pattern"; cat "$logs/race-$pattern.log"; failed=1 ;;
        esac
    done
    case $reported in
    *no_order*) ;;
    *) echo "FAILED: racecheck does not report a race"; failed=1 ;;
    esac
    for program in $race_programs; do
        log=$logs/race-$program.txt
        echo "== racecheck $program: $log"
        sh "$dir/race_summary.sh" "$log" "$dir/race_known.txt" "$reported" ||
            { echo "FAILED: racecheck $program"; failed=1; }
        grep -q "RACECHECK SUMMARY" "$log" || { echo "FAILED: racecheck $program did not end"; failed=1; }
    done
fi

grep -h "worst" "$logs"/random-*.log | sort |
    awk '{ m[$1] = m[$1] > $4+0 ? m[$1] : $4+0; x[$1] = x[$1] > $7+0 ? x[$1] : $7+0 }
    END { for (t in m) print t, "worst median", m[t], "worst maximum", x[t] }'
awk -v want="$cases" '/ cases: /{ c += $1; f += $(NF-1) }
    END { print c + 0, "cases,", f + 0, "failures"; exit c < want || f > 0 }' "$logs"/random-*.log || failed=1

if $bench; then
    run bench_cuda "$dir/bin/bench_cuda"
    run bench_gpu_ipc "$dir/bin/bench_gpu_ipc" "$dir/bin/dropkvd"
    cat "$logs/bench_cuda.log" "$logs/bench_gpu_ipc.log"
    report
fi
[ $failed -eq 0 ] && echo "GPU tests: all passed"
exit $failed
