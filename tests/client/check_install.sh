#!/bin/sh
# What `meson install` puts down is enough to build and run programs: the examples are compiled with
# pkg-config against an installation in a scratch folder, and ask a daemon, then nobody.
#
# usage: check_install.sh "CC..." "FLAGS..." BUILD_DIR ROOT DROPKVD
set -eu
cc=$1 sanitize=$2 build=$3 root=$4 dropkvd=$5
command -v pkg-config >/dev/null || { echo "skipped: no pkg-config"; exit 77; }
scratch=$(mktemp -d)
daemon=
cleanup() {
    [ -z "$daemon" ] || kill "$daemon" 2>/dev/null || true
    rm -rf "$scratch"
}
trap cleanup EXIT

fail() {
    echo "$1"
    [ -z "${2:-}" ] || cat "$2"
    exit 1
}

DESTDIR=$scratch meson install -C "$build" --no-rebuild --quiet >"$scratch/install.log" 2>&1 ||
    fail "meson install failed" "$scratch/install.log"
pc=$(find "$scratch" -name dropkv.pc)
lib=$(dirname "$(find "$scratch" -name libdropkv.so)")
[ -n "$pc" ] || fail "dropkv.pc was not installed"
find "$scratch" -name '*.h' -path '*include*' | sed 's|.*/include/||' | sort >"$scratch/headers"
(cd "$root/client" && ls dropkv.h dropkv/*.h) | sort | diff "$scratch/headers" - ||
    fail "the installed headers are not dropkv.h and its parts"

PKG_CONFIG_PATH=$(dirname "$pc") PKG_CONFIG_SYSROOT_DIR=$scratch
export PKG_CONFIG_PATH PKG_CONFIG_SYSROOT_DIR
flags="$sanitize $(pkg-config --cflags --libs dropkv)"
for example in chunks keep layers prompts; do
    # shellcheck disable=SC2086 # words
    $cc -std=c99 -D_POSIX_C_SOURCE=200809L -Wall -Wextra -Werror "$root/client/examples/$example.c" \
        -o "$scratch/$example" $flags
done

# C++ programs use the same header, initialisers included. (Sanitizers of another compiler would not
# mix.)
if [ -z "$sanitize" ] && command -v c++ >/dev/null; then
    cat >"$scratch/use.cc" <<'CC'
#include <dropkv.h>
int main()
{
    struct dropkv_request request = DROPKV_REQUEST_INIT;
    struct dropkv_client_options options = DROPKV_CLIENT_OPTIONS_INIT;
    struct dropkv_prompt prompt = DROPKV_PROMPT_INIT;
    struct dropkv_cache_layout cache = DROPKV_CACHE_LAYOUT_INIT;
    struct dropkv_stash_layout stash = DROPKV_STASH_LAYOUT_INIT;
    struct dropkv_param param = dropkv_int("window", 8);
    prompt.params = &param;
    if (cache.struct_size == stash.struct_size + prompt.struct_size)
        return 2;
    request.params = &param;
    return request.struct_size == options.struct_size || dropkv_version_number() == 0;
}
CC
    # shellcheck disable=SC2086 # words
    c++ -std=c++11 -Wall -Wextra -Werror "$scratch/use.cc" -o "$scratch/use" $flags
fi

# The daemon's log says where it listens.
mkfifo "$scratch/log"
"$dropkvd" --http 127.0.0.1:0 --socket "$scratch/run/s" 2>"$scratch/log" &
daemon=$!
port=
exec 3<"$scratch/log"
while [ -z "$port" ] && read -r line <&3; do
    port=$(echo "$line" | sed -n 's/.*listening on .*, port \([0-9]*\)$/\1/p')
done
[ -n "$port" ] || fail "the daemon did not start"

LD_LIBRARY_PATH=$lib
export LD_LIBRARY_PATH
"$scratch/keep" "http://127.0.0.1:$port" >"$scratch/kept" 2>&1 || fail "keep failed:" "$scratch/kept"
grep -q '^KV head 0 keeps 64 of 2048 tokens:.* 1000 ' "$scratch/kept" ||
    fail "keep did not find the needle:" "$scratch/kept"
"$scratch/layers" "http://127.0.0.1:$port" >"$scratch/kept" 2>&1 ||
    fail "layers failed:" "$scratch/kept"
[ "$(grep -c 'keeps 51 of 1024 tokens' "$scratch/kept")" -eq 12 ] ||
    fail "layers did not answer for 12 layers:" "$scratch/kept"
"$scratch/prompts" "unix://$scratch/run/s" >"$scratch/kept" 2>&1 ||
    fail "prompts failed:" "$scratch/kept"
[ "$(grep -c 'keeps.* 100 101 102 103 ' "$scratch/kept")" -eq 12 ] ||
    fail "prompts did not find the needle in 4 layers of 3 sequences:" "$scratch/kept"
for strategy in last budget every; do
    "$scratch/chunks" "http://127.0.0.1:$port" $strategy >"$scratch/kept" 2>&1 ||
        fail "chunks $strategy failed:" "$scratch/kept"
    grep -q "^$strategy: the cache holds 409 of 4096 tokens; token 700 is among them" "$scratch/kept" ||
        fail "chunks $strategy kept something else:" "$scratch/kept"
done
"$scratch/keep" embedded: >"$scratch/kept" 2>&1 || fail "keep embedded: failed:" "$scratch/kept"
grep -q '^KV head 0 keeps 64 of 2048 tokens:.* 1000 ' "$scratch/kept" ||
    fail "keep embedded: did not find the needle:" "$scratch/kept"
find "$scratch" -name dkv-engine.so -delete
code=0
"$scratch/keep" embedded: >"$scratch/said" 2>&1 || code=$?
[ "$code" -eq 1 ] && grep -q 'dkv-engine.so is neither beside libdropkv nor' "$scratch/said" ||
    fail "keep embedded: ended with $code where there is no engine:" "$scratch/said"
kill "$daemon"
wait "$daemon" || fail "the daemon did not end well"
daemon=

for example in keep layers; do
    code=0
    "$scratch/$example" http://127.0.0.1:1 2>"$scratch/said" || code=$?
    [ "$code" -eq 1 ] && grep -q 'could not connect' "$scratch/said" ||
        fail "$example ended with $code where nobody listens:" "$scratch/said"
done
echo "install: the examples build with pkg-config and run"
