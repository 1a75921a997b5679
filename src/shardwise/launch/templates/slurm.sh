#!/bin/bash
#SBATCH --job-name=%name
#SBATCH --nodes=%nodes
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=%gpus
#SBATCH --exclusive
%time#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@%notice

%{head}export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=%patience
# Before the time limit, and when another job takes the nodes, the ranks save and end, and the job is queued again.
stopped=
trap 'stopped=yes; kill -TERM "$run"' TERM
srun --kill-on-bad-exit=1 --cpu-bind=none %command &
run=$!
wait "$run"; code=$?
while kill -0 "$run" 2> /dev/null; do wait "$run"; code=$?; done
# The signal may have ended a wait after the run had ended: the shell still knows how.
if [ -n "$stopped" ] && [ "$code" -eq 143 ]; then wait "$run"; last=$?; [ "$last" -eq 127 ] || code=$last; fi
state=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %%T)  # no more RUNNING where scancel sent the signal
if [ -n "$stopped" ] && [ "$code" -ne 0 ] && [ "$state" = RUNNING ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
