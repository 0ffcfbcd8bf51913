#!/bin/sh
# Runs inside the booted root of deb.sh, as root, under systemd. Ends with "deb: every check passed".
# States are waited for by asking again, each question being a round trip to systemd or the daemon.
set -eu
exec 2>&1
dump=/root/tiny_dump_n1024.safetensors
socket=unix:///run/dropkv/dropkvd.sock
http=http://127.0.0.1:8480

fail() {
    echo "FAILED: $1"
    systemctl status --no-pager --full dropkvd.service dropkvd.socket || true
    journalctl --no-pager -u dropkvd.service -u dropkvd.socket | tail -n 40
    exit 1
}
passed() { echo "ok: $1"; }

# within SECONDS DESCRIPTION COMMAND...
within() {
    deadline=$(($(date +%s) + $1)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        [ "$(date +%s)" -lt "$deadline" ] || fail "$what"
    done
    passed "$what"
}

main_pid() { systemctl show -P MainPID dropkvd.service; }
restarts() { systemctl show -P NRestarts dropkvd.service; }
score() { dropkv-client score --endpoint "$1" --keep-ratio 0.1 --format json "$dump"; }
http_code() { curl -s -o /dev/null -w '%{http_code}' "$@"; }
worker_of() { tr ' ' '\n' <"/proc/$1/task/$1/children" | head -n 1; }

# ---- installed and started by the package ----
systemctl is-active -q dropkvd.socket || fail "the sockets are not listening"
systemctl is-active -q dropkvd.service || fail "the service is not running"
systemctl show -P StatusText dropkvd.service | grep -q "serving with engine cpu" || fail "no status text"
[ "$(stat -c '%a %U %G' /run/dropkv/dropkvd.sock)" = "660 dropkv dropkv" ] || fail "the socket's mode"
passed "the package starts sockets and service"

pid=$(main_pid)
grep -q '^CapEff:[[:space:]]*0000000000000000$' "/proc/$pid/status" || fail "the daemon has capabilities"
grep -q '^NoNewPrivs:[[:space:]]*1$' "/proc/$pid/status" || fail "the daemon may get new privileges"
grep -q '^Seccomp:[[:space:]]*2$' "/proc/$pid/status" || fail "no system call filter"
[ "$(stat -c %U "/proc/$pid")" = dropkv ] || fail "the daemon's user"
passed "no capability, no new privilege, system calls filtered"

# ---- who may come in ----
useradd -m -G dropkv member
useradd -m stranger
score "$http" >/root/by-http.json || fail "scoring over HTTP"
chmod 644 "$dump"
cp "$dump" /home/member/ && cp "$dump" /home/stranger/
as() { runuser -u "$1" -- dropkv-client score --endpoint "$socket" --keep-ratio 0.1 --format json "/home/$1/$(basename "$dump")"; }
as member >/root/by-socket.json || fail "a member of the group cannot score over the socket"
grep -o '"keep_indices".*' /root/by-http.json >/root/a && grep -o '"keep_indices".*' /root/by-socket.json >/root/b
cmp -s /root/a /root/b || fail "the two fronts keep different tokens"
! as stranger >/dev/null 2>&1 || fail "a stranger may use the socket"
passed "HTTP and the group's members are served alike, strangers are not"

# ---- restarts ----
old=$(main_pid)
systemctl restart --no-block dropkvd.service
score "$http" >/dev/null || fail "a request during a restart"
within 30 "a restart with the sockets open" test "$(main_pid)" != "$old"
within 30 "serving again" systemctl is-active -q dropkvd.service
kill -9 "$(main_pid)"
within 30 "a killed daemon comes back" sh -c '[ "$(systemctl show -P NRestarts dropkvd.service)" = 1 ]'
score "$http" >/dev/null || fail "scoring after a crash"

kill -9 "$(worker_of "$(main_pid)")"
score "$http" >/dev/null || fail "scoring after a worker's end"
[ "$(restarts)" = 1 ] || fail "a worker's end restarted the daemon"
passed "a worker's end is not the daemon's"

systemctl reload dropkvd.service || fail "reload"
within 30 "the daemon has heard of the reload" sh -c 'journalctl --no-pager -u dropkvd.service | grep -q SIGHUP:'
passed "reload"

# ---- the watchdog ----
mkdir -p /etc/systemd/system/dropkvd.service.d
printf '[Service]\nWatchdogSec=1\n' >/etc/systemd/system/dropkvd.service.d/watchdog.conf
systemctl daemon-reload
systemctl restart dropkvd.service
kill -STOP "$(worker_of "$(main_pid)")"
within 60 "a silent worker ends in a restart by the watchdog" sh -c \
    'journalctl --no-pager -u dropkvd.service | grep -q "Watchdog timeout"'
within 60 "serving after the watchdog" score "$http"
rm /etc/systemd/system/dropkvd.service.d/watchdog.conf

# ---- tokens ----
token=0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
(umask 077 && printf 'tester %s\n' $token >/etc/dropkv/tokens)
cp /usr/share/doc/dropkvd/examples/tokens.conf /etc/systemd/system/dropkvd.service.d/
systemctl daemon-reload
systemctl restart dropkvd.service || fail "start with tokens"
[ "$(http_code $http/metrics)" = 401 ] || fail "metrics without a token"
[ "$(http_code -H "Authorization: Bearer $token" $http/metrics)" = 200 ] || fail "metrics with a token"
! runuser -u member -- cat "/run/credentials/dropkvd.service/tokens" >/dev/null 2>&1 || fail "others can read the tokens"
passed "tokens come as a credential"
rm /etc/systemd/system/dropkvd.service.d/tokens.conf /etc/dropkv/tokens
systemctl daemon-reload

# ---- a wrong configuration ----
cp /etc/dropkv/dropkvd.json /root/good.json
echo '{"device": "cpu", "threads": -1}' >/etc/dropkv/dropkvd.json
! systemctl restart dropkvd.service 2>/dev/null || fail "a wrong configuration starts"
[ "$(systemctl show -P ExecMainStatus dropkvd.service)" = 78 ] || fail "exit status of a wrong configuration"
[ "$(systemctl show -P SubState dropkvd.service)" = failed ] || fail "it is tried again and again"
journalctl --no-pager -u dropkvd.service | grep -q "threads" || fail "the log does not name the field"
cp /root/good.json /etc/dropkv/dropkvd.json
systemctl reset-failed dropkvd.service
systemctl restart dropkvd.socket dropkvd.service || fail "start after the mistake was mended"
passed "a wrong configuration fails once and says why"

# ---- installed over itself, as an upgrade does ----
old=$(main_pid)
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --reinstall /root/debs/dropkvd_*.deb >/root/upgrade.log 2>&1 ||
    { cat /root/upgrade.log; fail "upgrade"; }
[ "$(main_pid)" != "$old" ] || fail "the old daemon still runs after an upgrade"
score "$http" >/dev/null || fail "scoring after an upgrade"
passed "upgrade"

# ---- removed ----
systemctl stop dropkvd.service 2>/dev/null
[ "$(systemctl show -P Result dropkvd.service)" = success ] || fail "stop"
passed "stop"
DEBIAN_FRONTEND=noninteractive apt-get remove -y -qq dropkvd >/root/remove.log || { cat /root/remove.log; fail "remove"; }
[ -f /etc/dropkv/dropkvd.json ] || fail "remove took the configuration"
! systemctl is-active -q dropkvd.socket || fail "the socket listens after remove"
DEBIAN_FRONTEND=noninteractive apt-get purge -y -qq dropkvd >/root/purge.log || { cat /root/purge.log; fail "purge"; }
for path in /etc/dropkv/dropkvd.json /usr/bin/dropkvd /lib/systemd/system/dropkvd.service \
    /etc/systemd/system/sockets.target.wants/dropkvd.socket /run/dropkv/dropkvd.sock; do
    [ ! -e "$path" ] || fail "purge left $path"
done
passed "remove and purge"
echo "deb: every check passed"
