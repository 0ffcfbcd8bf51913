#!/bin/sh
# The public headers, the version script and the built library name the same functions.
#
# usage: check_exports.sh LIBRARY ROOT
set -eu
library=$1 root=$2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

sed -n 's/^ *\(dropkv_[a-z_]*\);$/\1/p' "$root/client/libdropkv.map" | sort >"$scratch/script"
sed -n '/^DROPKV_API/p' "$root"/client/dropkv/*.h |
    sed 's/.*[ *]\(dropkv_[a-z_]*\)(.*/\1/' | sort >"$scratch/header"
nm -D --defined-only "$library" | awk '$2 == "T" || $2 == "D" || $2 == "B" || $2 == "R" {
    sub(/@.*/, "", $3); print $3 }' | sort >"$scratch/library"

for other in header library; do
    diff -u "$scratch/script" "$scratch/$other" || { echo "libdropkv.map and $other differ"; exit 1; }
done
[ -s "$scratch/script" ] || { echo "no symbols found"; exit 1; }
readelf -d "$library" | grep -q 'SONAME.*\[libdropkv\.so\.[0-9]*\]' || { echo "no soname"; exit 1; }
echo "exports: $(wc -l <"$scratch/script") functions"
