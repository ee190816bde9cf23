#!/bin/bash
# Installs, upgrades and removes the Debian package in a root of its own, which begins as this machine's: what is written
# there goes to a tmpfs. Usage: package.sh OLD.deb NEW.deb WORKLOAD, as root, in mount and pid namespaces of its own.
set -euo pipefail
old=$(realpath "$1") new=$(realpath "$2") workload=$(realpath "$3")
# What this shell was given must not be in the way of a dump.
for fd in /proc/$$/fd/*; do fd=${fd##*/}; [ "$fd" -le 2 ] || [ "$fd" = 255 ] || eval "exec $fd>&-"; done

base=$(mktemp -d)
mount -t tmpfs tmpfs "$base"
mkdir "$base"/{upper,work,root}
mount -t overlay overlay -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" "$base/root"
cd "$base/root"
cp "$old" old.deb; cp "$new" new.deb; cp "$workload" workload
mount -t proc proc proc
mount --rbind /dev dev
mount --rbind /sys sys
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
mkdir outside
pivot_root . outside
umount -l /outside
hash -r
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
unset GPUCR_LIB_DIR GPUCR_CRIU GPUCR_STORE LD_LIBRARY_PATH
# Nothing of gpucr is here yet.
rm -rf /var/lib/gpucr /usr/local/lib/gpucr /etc/gpucr
exec < /dev/null

say() { echo "== $*"; }

say install
dpkg -i /old.deb
gpucr check
for file in /usr/share/man/man1/gpucr-run.1.gz /usr/share/bash-completion/completions/gpucr /usr/include/gpucr.h \
    /usr/share/zsh/vendor-completions/_gpucr /usr/share/fish/vendor_completions.d/gpucr.fish \
    /usr/lib/x86_64-linux-gnu/libgpucr.so /usr/lib/systemd/system/gpucr@.service; do
    test -s "$file"
done
bash -n /usr/share/bash-completion/completions/gpucr
dpkg --verify gpucr

say "a program is at work"
cd /tmp
gpucr run --device soft -- /workload sgd --steps 100000 --step-delay-ms 5 > log 2>&1 &
program=$!
until grep -q '^step ' log; do sleep 0.05; done
loaded() { grep -o '/var/lib/gpucr/gpucr-shim-[^/]*/libcuda.so.1' "/proc/$program/maps" | sort -u; }
before=$(loaded)
test -n "$before"

say upgrade
dpkg -i /new.deb
test "$(loaded)" = "$before"
test "$(sha256sum < "$before")" = "$(sha256sum < "/proc/$program/root$before")"
! grep -q "(deleted)" <(grep gpucr-shim "/proc/$program/maps")
cmp -s "$before" /usr/lib/gpucr/libgpucr_intercept.so && { echo "the new shim is the old one"; exit 1; }
gpucr dump --pid "$program" -o image
wait "$program" || true
grep -c '^step ' log > steps
gpucr restore -d image > pid
until [ "$(grep -c '^step ' log)" -gt "$(cat steps)" ]; do sleep 0.05; done
program=$(cat pid)
test "$(loaded)" = "$before"

if command -v systemd-analyze > /dev/null; then
    say units
    systemd-analyze verify gpucr@train.service gpucr-warm@image.service
else
    say "units not verified: no systemd-analyze"
fi

say remove
dpkg -r gpucr
test ! -e /usr/bin/gpucr && test ! -e /usr/lib/gpucr && test ! -e /usr/lib/systemd/system/gpucr@.service
test -f "$before"
dpkg -i /new.deb
dpkg -P gpucr
# Its program still has it.
test -f "$before"
kill -0 "$program"
kill -KILL "$program"
until [ ! -e "/proc/$program/maps" ] || [ ! -s "/proc/$program/maps" ]; do sleep 0.05; done
dpkg -i /new.deb
dpkg -P gpucr
test ! -e /var/lib/gpucr
say "all is well"
