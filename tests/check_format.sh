#!/bin/sh
# The tree is formatted by clang-format 14 (.clang-format). Other versions format differently, so
# without version 14 this is skipped.
set -eu
cd "${1:-$(dirname "$0")/..}"
for tool in clang-format-14 clang-format; do
    command -v "$tool" >/dev/null 2>&1 && "$tool" --version | grep -q 'version 14\.' && break
    tool=
done
[ -n "${tool:-}" ] || { echo "skipped: clang-format 14 is not installed"; exit 77; }
find proto kernels client server tests -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' | sort |
    xargs "$tool" --dry-run -Werror
echo "format: clean"
