#!/bin/sh
# The runtime stage of the Dockerfile: libraries, user, and the socket's directory.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2046 # a list of words
apt-get install -y -qq --no-install-recommends $(cat /usr/share/dropkvd/packages) >/dev/null
rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb
for program in dropkvd dropkv-client; do
    ! ldd "/usr/bin/$program" | grep 'not found' || { echo "setup.sh: $program lacks a library" >&2; exit 1; }
done
# Without useradd, which slim images may lack.
echo 'dropkv:x:10480:' >>/etc/group
echo 'dropkv:x:10480:10480:DropKV daemon:/nonexistent:/usr/sbin/nologin' >>/etc/passwd
mkdir -p /run/dropkv
chown 10480:10480 /run/dropkv
chmod 750 /run/dropkv
