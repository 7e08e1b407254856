#!/bin/bash
#SBATCH --job-name=my-run
#SBATCH --nodes=4 --ntasks-per-node=1 --exclusive
#SBATCH --requeue --open-mode=append --signal=TERM@120
#SBATCH --output=my-run_%j.log
# Add what the cluster needs, such as --gpus-per-node, --partition and --time. All nodes see the directory of the run.

restarts=${SLURM_RESTART_COUNT:-0}
job=$SLURM_JOB_ID
if [ -n "$SLURM_ARRAY_JOB_ID" ]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
export HPNLP_ATTEMPT=$restarts:$job

srun --kill-on-bad-exit=1 hpnlp train --config=lm/bytes '--workdir=runs/My Run' '--data.path=a b'"'"'s.txt' --train.steps=9 --debug
code=$?

# 75: try again, as after the loss of a process; 134 and 137: aborted or killed. 2: invalid input, 1: a defect, 130: a signal.
case $code in
  75 | 134 | 137)
    if [ "$restarts" -lt 10 ]; then scontrol requeue "$job"; fi ;;
esac
exit $code
