#!/bin/bash
# Starts a server from a warm image and checks that it answers: server.sh IMAGE HEALTH...
#
# HEALTH is a command that succeeds when the server answers, such as: curl -fsS http://127.0.0.1:8000/health
# Each instance has pids of its own. Make the image once, when the server is ready for its first request:
#
#   gpucr run -- ./server &
#   until curl -fsS http://127.0.0.1:8000/health; do sleep 1; done
#   gpucr dump --pid $! --tcp-close -o IMAGE
#
# Prints the pid of the server, which keeps running in the background. A server that does not answer in time is ended.
set -u
image=$1
shift
limit=${LIMIT:-60}

# Once per host: later restores find the image in memory. It is no error if it is warm already.
gpucr warm --list --json | grep -qF "\"$(realpath "$image")\"" || gpucr warm "$image" >&2 || exit

pid=$(gpucr restore --new-pids -d ${GPUCR_OPTIONS:-} "$image") || exit
for ((second = 0; second < limit; second++)); do
    if "$@" >&2; then
        echo "$pid"
        exit 0
    fi
    kill -0 "$pid" 2>/dev/null || break
    sleep 1
done
echo "server.sh: process $pid does not answer" >&2
kill -KILL "$pid" 2>/dev/null
exit 1
