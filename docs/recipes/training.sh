#!/bin/bash
# A training that is saved every ten minutes and goes on where it was, whatever has ended it: training.sh STORE CMD...
#
# Start it by the same line each time. The store is for this training alone: remove it to begin anew.
set -u
store=$1
shift
# With pids of its own the program finds them free after a restart of the host too. The newest two images are kept; a program
# that crashes, or whose GPU does, is restored up to three times without a new image in between.
exec gpucr run --new-pids --store "$store" --resume --every "${EVERY:-10m}" --keep 2 --restart 3 ${GPUCR_OPTIONS:-} -- "$@"
