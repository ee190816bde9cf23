#!/bin/bash
# Empties a host for maintenance, and fills it again: maintenance.sh save STORE, then maintenance.sh restore STORE
#
# `save` saves every program that runs under gpucr, and ends it; what cannot be saved runs on, and is named. `restore` brings
# back those that are not back yet, each with a pid namespace of its own, since a host that was started anew has given
# their pids to others. Programs that a unit or a job of a scheduler supervises are the unit's or the job's: stop these first.
set -u
store=$2
tag=maintenance
status=0
case $1 in
save)
    # A program may have several processes: only those whose parents are not under gpucr are roots of a program.
    pids=" $(gpucr ps --format '{{.pid}}' | tr '\n' ' ') "
    for pid in $pids; do
        parent=$(ps -o ppid= -p "$pid" | tr -d ' ')
        case $pids in *" $parent "*) continue ;; esac
        gpucr dump --pid "$pid" --store "$store" --tag $tag ${GPUCR_OPTIONS:-} || status=1
    done
    ;;
restore)
    for name in $(gpucr ls "$store" --tag $tag --format '{{.name}}'); do
        if gpucr restore --new-pids -d "$store/images/$name"; then
            gpucr rm "$store/images/$name" || status=1
        else
            status=1
        fi
    done
    ;;
*)
    echo "usage: maintenance.sh save|restore STORE" >&2
    status=2
    ;;
esac
exit $status
