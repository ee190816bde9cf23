#!/bin/bash
# Runs a training that is saved every ten minutes and resumes where it left off, whatever ended it: training.sh STORE CMD...
#
# Start it with the same command each time. The store is for this training alone: remove it to start over.
set -u
store=$1
shift
# In a pid namespace of its own the program finds its pids free even after a reboot. The two newest images are kept; if the
# program or its GPU fails, the program is restored, at most three times without a new image in between.
exec gpucr run --new-pids --store "$store" --resume --every "${EVERY:-10m}" --keep 2 --restart 3 ${GPUCR_OPTIONS:-} -- "$@"
