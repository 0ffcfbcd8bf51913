#!/bin/sh
# What `meson install` puts down is enough to build and run a program: the example is compiled with
# pkg-config against an installation in a scratch folder, and asks an endpoint where nobody listens.
#
# usage: check_install.sh "CC..." BUILD_DIR ROOT [ENDPOINT]
set -eu
cc=$1 build=$2 root=$3
command -v pkg-config >/dev/null || { echo "skipped: no pkg-config"; exit 77; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

DESTDIR=$scratch meson install -C "$build" --no-rebuild --quiet >"$scratch/install.log" 2>&1 ||
    { cat "$scratch/install.log"; exit 1; }
pc=$(find "$scratch" -name dropkv.pc)
lib=$(dirname "$(find "$scratch" -name libdropkv.so)")
[ -n "$pc" ] || { echo "dropkv.pc was not installed"; exit 1; }
[ "$(find "$scratch" -name '*.h' -path '*include*' | wc -l)" -eq 1 ] ||
    { echo "dropkv.h is not the only installed header"; exit 1; }

PKG_CONFIG_PATH=$(dirname "$pc") PKG_CONFIG_SYSROOT_DIR=$scratch
export PKG_CONFIG_PATH PKG_CONFIG_SYSROOT_DIR
# shellcheck disable=SC2046 # words
$cc -std=c99 -Wall -Wextra -Werror "$root/client/examples/keep.c" -o "$scratch/keep" \
    $(pkg-config --cflags --libs dropkv)

# C++ programs use the same header, initialisers included.
if command -v c++ >/dev/null; then
    cat >"$scratch/use.cc" <<'CC'
#include <dropkv.h>
int main()
{
    struct dropkv_request request = DROPKV_REQUEST_INIT;
    struct dropkv_client_options options = DROPKV_CLIENT_OPTIONS_INIT;
    struct dropkv_param param = dropkv_int("window", 8);
    request.params = &param;
    return request.struct_size == options.struct_size || dropkv_version_number() == 0;
}
CC
    # shellcheck disable=SC2046 # words
    c++ -std=c++11 -Wall -Wextra -Werror "$scratch/use.cc" -o "$scratch/use" \
        $(pkg-config --cflags --libs dropkv)
fi

LD_LIBRARY_PATH=$lib
export LD_LIBRARY_PATH
code=0
"$scratch/keep" http://127.0.0.1:1 2>"$scratch/said" || code=$?
[ "$code" -eq 1 ] && grep -q 'could not connect' "$scratch/said" ||
    { echo "the example ended with $code:"; cat "$scratch/said"; exit 1; }
echo "install: the example builds with pkg-config and runs"
