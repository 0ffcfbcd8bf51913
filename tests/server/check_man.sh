#!/bin/sh
# The manual names every option that the program has, and no other.
#
# usage: check_man.sh DROPKVD MANUAL
set -eu
program=$("$1" --help | grep -oE '^ +(-[?a-zA-Z], )?--[a-z-]+' | sed -E 's/.*--//' | grep -vE '^(help|usage)$' | sort -u)
manual=$(grep -oE '^\.It Fl -[a-z-]+' "$2" | sed -E 's/.*Fl -//' | sort -u)
if [ "$program" != "$manual" ]; then
    echo "only in one of dropkvd --help (first) and its manual (second):"
    echo "$program" >/tmp/dropkvd-options.$$
    echo "$manual" | diff /tmp/dropkvd-options.$$ - || true
    rm -f /tmp/dropkvd-options.$$
    exit 1
fi
