#!/bin/sh
# What an idle daemon takes: memory and processor time of the front and of its workers, over a while in
# which a service manager's watchdog is fed and Prometheus' usual scrape comes by every 15 s.
#
# usage: bench_idle.sh DROPKVD [SECONDS]       default 60; the processor time is in ticks of 10 ms
#
# Rss is what is mapped and present, shared library pages included; Pss shares those out among the
# processes that map them.
set -eu
program=$1 seconds=${2:-60}
work=$(mktemp -d)
port_file=$work/port
NOTIFY_SOCKET=@dropkvd-idle WATCHDOG_USEC=60000000 \
    "$program" --device cpu --http 127.0.0.1:0 --socket "$work/run/dropkvd.sock" --port-file "$port_file" 2>"$work/log" &
front=$!
trap 'kill $front; wait $front || true; rm -rf "$work"' EXIT
until [ -s "$port_file" ]; do
    kill -0 $front || { cat "$work/log"; exit 1; }
    sleep 0.05
done
scrape() { curl -s -o /dev/null "http://127.0.0.1:$(cat "$port_file")/metrics"; }
ticks() { awk '{ print $14 + $15 }' "/proc/$1/stat"; }
memory() { awk '/^Rss:/ { r = $2 } /^Pss:/ { p = $2 } END { printf "Rss %.1f MiB, Pss %.1f MiB", r / 1024, p / 1024 }' "/proc/$1/smaps_rollup"; }

scrape
processes="$front $(cat "/proc/$front/task/$front/children")"
for p in $processes; do eval "before_$p=$(ticks "$p")"; done
end=$(($(date +%s) + seconds))
while [ "$(date +%s)" -lt "$end" ]; do
    sleep 15
    scrape
done
for p in $processes; do
    spent=$(($(ticks "$p") - $(eval "echo \$before_$p")))
    printf '%s (%s): %s, %s0 ms of processor time in %s s = %.3f%% of one\n' "$(cat "/proc/$p/comm")" \
        "$([ "$p" = $front ] && echo front || echo worker)" "$(memory "$p")" "$spent" "$seconds" \
        "$(echo "$spent $seconds" | awk '{ print $1 / $2 }')"
done
