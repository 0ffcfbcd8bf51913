#!/bin/sh
# Every folder includes only what the layer table allows (CONTRIBUTING.md, "The tree"):
#
#   proto    libc and jansson (oip files alone)
#   kernels  proto's types, block, params and request
#   client   proto; the embedded transport alone kernels/engine.h
#   server   proto, kernels/engine.h
#
# usage: check_layers.sh [ROOT]; prints each offending line, exit 1 if there is one.
set -eu
cd "${1:-$(dirname "$0")/..}"
bad=0

# forbid FOLDER EXTENDED_REGEX WHY [FILES_TO_SKIP_REGEX]: no include line under FOLDER matches.
forbid() {
    hits=$(grep -rnE --include='*.[ch]' --include='*.cu' --include='*.cuh' \
        "^[[:space:]]*#[[:space:]]*include[[:space:]]*[<\"]($2)" "$1" | grep -vE "^($1/(${4:-$^})):" || true)
    if [ -n "$hits" ]; then
        printf '%s: %s\n%s\n' "$1" "$3" "$hits"
        bad=1
    fi
}

forbid proto '(kernels|client|server|tests)/' 'includes a layer above it'
forbid proto 'jansson' 'only oip*.c may see jansson' 'oip[a-z_]*\.[ch]'
forbid kernels '(client|server|tests)/' 'includes a layer above it'
forbid kernels 'proto/(oip|wire|conn|memfd)' "includes more of proto than types, block, params and request"
forbid kernels '(jansson|uv|microhttpd|curl/curl|popt)\.h' 'pure computation uses no service library'
forbid client '(server|tests)/' 'includes a layer beside or above it'
forbid client 'kernels/' 'only the embedded transport may include kernels/engine.h' 'cli/[a-z_]*\.[ch]|embedded[a-z_]*\.[ch]'
forbid client 'kernels/(cpu|cuda|ref|select)' 'reaches into the engine'
forbid server '(client|tests)/' 'includes a layer beside or above it'
forbid server 'kernels/(cpu|cuda|ref|select)' 'reaches into the engine'

# Includes are rooted at the repository: a quoted include names its folder. The parts of dropkv.h are
# installed without the repository, so they name each other as neighbours.
rootless=$(grep -rnE --include='*.[ch]' --include='*.cu' --include='*.cuh' \
    '^[[:space:]]*#[[:space:]]*include[[:space:]]*"[^/"]*"' proto kernels client server tests |
    grep -vE '"(config|dropkv_version)\.h"|^client/dropkv/' || true)
if [ -n "$rootless" ]; then
    printf 'includes must be rooted at the repository:\n%s\n' "$rootless"
    bad=1
fi

[ "$bad" -eq 0 ] && echo "layers: every include is allowed"
exit "$bad"
