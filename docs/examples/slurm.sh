#!/bin/bash
# A job for Slurm that is saved before its time limit, and resumes when it runs next: sbatch slurm.sh ./train ARGS...
# docs/schedulers.md explains it.
#SBATCH --gres=gpu:1
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300

# Where the images are: a folder for this job alone, on a disk that all hosts see. A requeued job keeps its number.
store=${GPUCR_JOBS:-/scratch/gpucr}/$SLURM_JOB_ID
mkdir -p "$store" || exit

run=
# Slurm signals this shell, which signals gpucr.
trap '[ -z "$run" ] || kill -USR1 "$run"' USR1
trap '[ -z "$run" ] || kill -TERM "$run"' TERM

gpucr run --store "$store" --resume --every 30m --keep 2 --restart 3 --on-signal usr1=end -- "$@" &
run=$!

# A signal ends `wait`, but not what is waited for.
wait "$run"
status=$?
while kill -0 "$run" 2>/dev/null; do
    wait "$run"
    status=$?
done
# It may have ended just as a signal came: the shell still knows its status.
if [ "$status" -gt 128 ]; then
    wait "$run"
    again=$?
    [ "$again" = 127 ] || status=$again
fi

# 75: it was saved, and is not done.
if [ "$status" = 75 ]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
