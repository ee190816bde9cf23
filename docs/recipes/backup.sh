#!/bin/bash
# Backs up a store with restic, and checks every image in the backup: backup.sh STORE
#
# RESTIC_REPOSITORY and RESTIC_PASSWORD_FILE say where the backup goes, as usual with restic. An image gets its name in a store
# only when it is complete and everything it needs is there. So every image that is listed when the backup begins is
# complete in the backup, as long as nothing is removed meanwhile (gpucr rm, forget, gc, run --keep). Each is checked in a copy.
set -eu
store=$(realpath "$1")
names=$(gpucr ls "$store" --format '{{.name}}')
restic backup --quiet --tag gpucr "$store"

copy=$(mktemp -d "${TMPDIR:-/tmp}/gpucr-backup.XXXXXX")
trap 'rm -rf "$copy"' EXIT
restic restore latest --quiet --tag gpucr --path "$store" --target "$copy"
for name in $names; do
    gpucr verify "$copy$store/images/$name"
done
