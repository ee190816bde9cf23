#!/bin/bash
# A backup of a store with restic, and a look whether it is whole: backup.sh STORE
#
# RESTIC_REPOSITORY and RESTIC_PASSWORD_FILE say where it goes, as always with restic. Only whole images are in a store by
# their names, and what they need is there before them. So an image that is in the list when the backup begins is whole
# in it, as long as nothing is removed meanwhile (gpucr rm, forget, gc, run --keep): each is checked in a copy.
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
