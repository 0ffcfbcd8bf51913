#!/bin/sh
# The systemd files: the units are valid with and without their drop-ins, the CPU unit's exposure is
# at most 2.0, and user and directory come out as the units expect them.
#
# usage: check_units.sh FOLDER DROPKVD       FOLDER: deploy/systemd
set -eu
units=$1 program=$(realpath "$2")
command -v systemd-analyze >/dev/null || { echo "skipped: systemd-analyze is not installed"; exit 77; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

fail() { echo "check_units: $1" >&2; exit 1; }

# The program of this build in place of an installed one; drop-ins where systemd looks for them.
place() {
    folder=$scratch/$1
    mkdir -p "$folder/dropkvd.service.d"
    cp "$units/dropkvd.service" "$units/dropkvd.socket" "$folder"
    sed -i "s#^ExecStart=dropkvd#ExecStart=$program#" "$folder/dropkvd.service"
    grep -q "^ExecStart=$program " "$folder/dropkvd.service" || fail "ExecStart is not what was expected"
}

for variant in cpu gpu tokens; do
    place $variant
    [ $variant = cpu ] || cp "$units/$variant.conf" "$folder/dropkvd.service.d/"
    systemd-analyze verify --man=no "$folder/dropkvd.service" "$folder/dropkvd.socket" >"$scratch/said" 2>&1 ||
        { cat "$scratch/said"; fail "$variant: not valid"; }
    # Unknown settings are warnings only.
    [ ! -s "$scratch/said" ] || { cat "$scratch/said"; fail "$variant: warnings"; }
    systemd-analyze security --no-pager --offline=true "$folder/dropkvd.service" >"$scratch/$variant.security" 2>&1 || true
    sed -n 's/.*Overall exposure level for \([^:]*\): \([0-9.]*\).*/'$variant': exposure \2/p' "$scratch/$variant.security"
done

exposure_is_low() { systemd-analyze security --no-pager --offline=true --threshold=20 "$1" >/dev/null 2>&1; }
exposure_is_low "$scratch/cpu/dropkvd.service" || { cat "$scratch/cpu.security"; fail "exposure above 2.0"; }
# This check can fail: without its sandbox the unit is over the mark.
mkdir "$scratch/bare"
grep -vE '^(Private|Protect|Restrict|System|Capab|IPAddr|User|NoNew|Device)' "$scratch/cpu/dropkvd.service" \
    >"$scratch/bare/dropkvd.service"
! exposure_is_low "$scratch/bare/dropkvd.service" || fail "a unit without a sandbox passes, too"

if [ "$(id -u)" -eq 0 ] && command -v systemd-sysusers >/dev/null; then
    root=$scratch/root
    mkdir -p "$root/etc" "$root/run"
    systemd-sysusers --root="$root" - <"$units/dropkv.sysusers" 2>/dev/null
    grep -q '^dropkv:.*:/nonexistent:/usr/sbin/nologin$' "$root/etc/passwd" || fail "no user dropkv was made"
    cp "$units/dropkv.tmpfiles" "$scratch/dropkv.conf"
    systemd-tmpfiles --root="$root" --create "$scratch/dropkv.conf" || fail "tmpfiles"
    wanted="750 $(sed -n 's/^dropkv:[^:]*:\([0-9]*:[0-9]*\):.*/\1/p' "$root/etc/passwd" | tr : ' ')"
    [ "$(stat -c '%a %u %g' "$root/run/dropkv")" = "$wanted" ] ||
        fail "/run/dropkv is $(stat -c '%a %u %g' "$root/run/dropkv"), wanted $wanted"
fi

# The configuration that is installed with the units, and the sockets it asks for.
sed 's/"socket_group": "dropkv"/"socket_group": "0"/' "$units/dropkvd.json" >"$scratch/dropkvd.json"
"$program" --config "$scratch/dropkvd.json" --check-config >/dev/null || fail "dropkvd.json"
echo "units: valid"
