#!/bin/sh
# From a clean checkout to kept tokens: installs the packages that are missing, builds the release,
# starts the daemon, scores the shipped dump of a real language model over HTTP, prints what is
# kept, and stops the daemon. Safe to run again.
#
# usage: deploy/quickstart.sh [dropkv-client score options]     e.g. --keep-ratio 0.05
set -eu
cd "$(dirname "$0")/.."

sh deploy/packages.sh build

# The GPU engine takes minutes to compile, so it is built here only for a GPU that is there.
PATH=$PATH:/usr/local/cuda/bin
device=cpu
gpu_options=-Dcuda=disabled
arch=$(sh deploy/gpu_arch.sh)
if [ -n "$arch" ]; then
    device=cuda:0
    gpu_options="-Dcuda=enabled -Dgpu_arch=$arch"
fi

# An older build may be from before there was a GPU, or a driver.
# shellcheck disable=SC2086 # a list of options
if [ -f build-release/build.ninja ]; then
    meson configure build-release $gpu_options >/dev/null
else
    rm -rf build-release
    meson setup build-release -Dbuildtype=release -Dtests=disabled $gpu_options >/dev/null
fi
ninja -C build-release --quiet

# Port 0 lets the system pick a free one; the daemon writes it to the port file once it is ready.
run_dir=$(mktemp -d)
daemon=
stop() {
    status=$?
    if [ -n "$daemon" ]; then
        kill -TERM "$daemon" 2>/dev/null || true
        wait "$daemon" || status=$?
    fi
    [ "$status" -eq 0 ] || sed 's/^/dropkvd: /' "$run_dir/log" >&2
    rm -rf "$run_dir"
    exit "$status"
}
trap stop EXIT
trap 'exit 130' INT TERM

build-release/server/dropkvd --device $device --http 127.0.0.1:0 --socket off \
    --port-file "$run_dir/port" >"$run_dir/log" 2>&1 &
daemon=$!
until [ -s "$run_dir/port" ]; do
    kill -0 "$daemon" 2>/dev/null || { echo "quickstart: the daemon did not start" >&2; exit 1; }
    sleep 0.05
done
port=$(cat "$run_dir/port")

echo "dropkvd is serving http://127.0.0.1:$port; scoring tests/data/dumps/tiny_dump_n1024.safetensors"
build-release/client/dropkv-client score --endpoint "http://127.0.0.1:$port" --keep-ratio 0.1 "$@" \
    tests/data/dumps/tiny_dump_n1024.safetensors
