#!/bin/sh
# Manual pages are clean mdoc, and tell of every option that the program's own help tells of and of
# no other.
#
# usage: check_man.sh PAGE PROGRAM [COMMAND...]
set -eu
page=$1 program=$2
shift 2
command -v mandoc >/dev/null || { echo "skipped: mandoc is not installed"; exit 77; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Pages that refer to each other need not be installed to be right.
mandoc -T lint "$page" | grep -v 'referenced manual not found' >"$scratch/lint" || true
[ ! -s "$scratch/lint" ] || { cat "$scratch/lint"; exit 1; }

mandoc -T ascii "$page" | sed "s/.$(printf '\b')//g" >"$scratch/text"
missing=0
for command in "${@:-}"; do
    # shellcheck disable=SC2086 # no command is no word
    "$program" $command --help >"$scratch/help"
    cat "$scratch/help" >>"$scratch/all-help"
    # An option that is there twice, as a scoring parameter and otherwise, hides its second form.
    for option in $(grep -oE '^ +(-., )?--[a-z][a-z0-9-]*' "$scratch/help" | grep -oE -- '--.*' | sort | uniq -d); do
        echo "$(basename "$program") $command has $option twice"
        missing=1
    done
    for option in $(grep -oE '(^|[ ,])--[a-z][a-z0-9-]*' "$scratch/help" | tr -d ' ,' | sort -u); do
        [ "$option" = --usage ] && continue
        grep -qE -- "$option([^a-z-]|\$)" "$scratch/text" ||
            { echo "$(basename "$page") does not tell of $command $option"; missing=1; }
    done
done
for option in $(grep '^\.It Fl ' "$page" | grep -oE ' -[a-z][a-z0-9-]+' | tr -d ' ' | sort -u); do
    grep -qE -- "-$option([^a-z-]|\$)" "$scratch/all-help" ||
        { echo "$(basename "$page") tells of -$option, which $(basename "$program") does not know"; missing=1; }
done
[ "$missing" -eq 0 ] && echo "man: $(basename "$page") is clean and complete"
exit "$missing"
