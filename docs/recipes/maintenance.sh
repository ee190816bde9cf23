#!/bin/bash
# Drains a host for maintenance, and brings its programs back: maintenance.sh save STORE, then maintenance.sh restore STORE
#
# `save` saves every program that runs under gpucr, and ends it; programs that cannot be saved keep running, and are named.
# `restore` brings back those that are not back yet, each in a pid namespace of its own, since after a reboot other processes
# may have their pids. Programs that a systemd unit or a scheduler's job supervises belong to that: stop the unit or job first.
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
