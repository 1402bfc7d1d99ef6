#!/usr/bin/env bash
# Runs the tests on the Python of Debian's development release, which is often newer than what is
# installed: tools/test_on_debian.sh [options of pytest]. Needs Linux, root and debootstrap; takes
# 1.5 GB in the folder $DEBIAN, which stays for the next time.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=$(realpath -m "${DEBIAN:-build/debian}")
packages=python3-dev,python3-venv,gcc,libc6-dev,git,ca-certificates

if ! [ -e "$folder/installed" ]; then
  debootstrap --variant=minbase --include="$packages" "${SUITE:-sid}" "$folder"
  touch "$folder/installed"
fi
# Those of this machine, which may know a proxy.
certificates=/etc/ssl/certs/ca-certificates.crt
cp "$certificates" "$folder$certificates"
# Gloo asks for the address of this machine by its name.
cp /etc/resolv.conf /etc/hosts "$folder/etc/"

unmount() { umount "$folder/dev" "$folder/proc"; }
mount --bind /proc "$folder/proc"
mount --bind /dev "$folder/dev" # multiprocessing needs /dev/shm
trap unmount EXIT

rm -rf "$folder/project"
mkdir "$folder/project"
git ls-files -z | tar --create --null --files-from=- | tar --extract --directory="$folder/project"

# Without the environment of this machine, whose paths do not exist there.
chroot "$folder" env --ignore-environment HOME=/root PATH=/usr/bin:/bin LANG=C.UTF-8 \
  SSL_CERT_FILE="$certificates" PIP_CERT="$certificates" bash -euc '
    cd /project
    [ -e /venv ] || python3 -m venv /venv
    /venv/bin/pip install --quiet --no-compile --constraint constraints.txt --editable ".[tests]"
    /venv/bin/python --version
    exec /venv/bin/python -m pytest -n auto --dist worksteal "$@"' bash "$@"
