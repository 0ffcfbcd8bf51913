#!/bin/sh
# The curves of docs/tuning.md are those of the queue as it is: a part of them is made again and compared.
#
# usage: check_tuning.sh SIM_TUNING FOLDER
set -eu
made=$("$1" clients)
[ "$made" = "$(cat "$2/clients.csv")" ] || {
    echo "docs/tuning is of another queue: make the .csv files again and draw them (docs/draw_tuning.py)"
    exit 1
}
echo "tuning: $(echo "$made" | wc -l) lines agree"
