#!/bin/sh
# Builds the image from its Dockerfile with buildah and runs it: as its own user the daemon starts, the
# health check passes, a dump is scored over the socket and over HTTP, SIGTERM ends it with status 0.
#
# No container engine and no registry are needed: buildah isolates by chroot, and the base image is a
# debootstrap root. What a chroot does not show (cgroups, namespaces, the GPU) is not tested here.
#
# usage: container.sh        about two minutes. Needs root, debootstrap and buildah. Not part of tests/run.sh.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
project=$(cd "$here/../.." && pwd)
. "$here/root.sh"
needs debootstrap buildah

work=$(mktemp -d /var/tmp/dropkvd-container.XXXXXX)
daemon=
clean_up() {
    status=$?
    [ -z "$daemon" ] || kill "$daemon" 2>/dev/null || true
    b rm --all >/dev/null 2>&1 || true
    umount "$work/storage/overlay" 2>/dev/null || true # the driver mounts it onto itself
    rm -rf "$work"
    exit "$status"
}
trap clean_up EXIT
fail() { echo "container: $1" >&2; exit 1; }
b() {
    command=$1
    shift
    buildah --root "$work/storage" --runroot "$work/run" --storage-driver overlay "$command" "$@"
}
export BUILDAH_ISOLATION=chroot

make_root "$work/base"
base=$(b from scratch)
b copy -q "$base" "$work/base" / >/dev/null
b commit -q "$base" localhost/base >/dev/null
rm -rf "$work/base"

b bud --format docker --pull-never --build-arg BUILD_BASE=localhost/base --build-arg RUNTIME_BASE=localhost/base \
    --build-arg REVISION=test -f "$project/deploy/container/Dockerfile" -t dropkvd "$project" >"$work/log" 2>&1 ||
    { tail -n 40 "$work/log"; fail "the image does not build"; }

b inspect --type image dropkvd | jq .Docker.config >"$work/config"
wants() { jq -e "$1" "$work/config" >/dev/null || { cat "$work/config"; fail "the image's configuration: not $1"; }; }
wants '.User == "10480:10480"'
wants '.Healthcheck.Test == ["CMD", "dropkv-client", "health", "--endpoint", "unix:///run/dropkv/dropkvd.sock"]'
wants '.Labels["org.opencontainers.image.revision"] == "test"'
wants '.Labels["org.opencontainers.image.version"] == "'"$(sed -n "s/^ *version: '\([0-9.]*\)',$/\1/p" "$project/meson.build")"'"'
wants '.Entrypoint == ["dropkvd"] and .StopSignal == "SIGTERM"'

container=$(b from --pull-never dropkvd)
mounted=$(b mount "$container")
cp "$project/tests/data/dumps/tiny_dump_n1024.safetensors" "$mounted/tmp/"
for trace in usr/share/dropkvd usr/bin/meson usr/bin/gcc src; do
    [ ! -e "$mounted/$trace" ] || fail "/$trace is in the image"
done
inside() { b run --isolation chroot --user 10480:10480 "$container" -- "$@"; }

inside sh -c 'echo $$ >/tmp/pid; exec dropkvd "$@"' sh $(jq -r '.Cmd[]' "$work/config") --http 127.0.0.1:18480 \
    >"$work/daemon" 2>&1 &
runner=$!
deadline=$(($(date +%s) + 60))
until inside dropkv-client health --endpoint unix:///run/dropkv/dropkvd.sock >"$work/health" 2>&1; do
    [ "$(date +%s)" -lt $deadline ] || { cat "$work/daemon" "$work/health"; fail "it does not get healthy"; }
done
for endpoint in unix:///run/dropkv/dropkvd.sock http://127.0.0.1:18480; do
    inside dropkv-client score --endpoint $endpoint --keep-ratio 0.1 --format json /tmp/tiny_dump_n1024.safetensors \
        >"$work/answer" || fail "scoring over $endpoint"
    jq -e '.blocks | length == 6' "$work/answer" >/dev/null || fail "the answer over $endpoint"
done
daemon=$(cat "$mounted/tmp/pid") # a chroot leaves the processes' numbers as they are
[ "$(stat -c %u "/proc/$daemon")" = 10480 ] || fail "the daemon runs as $(stat -c %U "/proc/$daemon")"
kill -TERM "$daemon"
daemon=
wait $runner || { cat "$work/daemon"; fail "SIGTERM ended it with status $?"; }
echo "container: built, healthy, scored over both fronts, stopped; $(du -sm "$mounted/usr/bin/dropkvd" | cut -f1) MB of daemon"
