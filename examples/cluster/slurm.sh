#!/usr/bin/env bash
# A run over the nodes of a Slurm job: sbatch examples/cluster/slurm.sh CONFIG [key=value ...]
# CONFIG as `roll run` takes it. One task a node: node 0 drives the run, the others serve it.
#SBATCH --job-name=roll
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --output=roll-%j.log
#SBATCH --open-mode=append
set -euo pipefail
[[ $# -ge 1 ]] || { echo "usage: sbatch examples/cluster/slurm.sh CONFIG [key=value ...]" >&2; exit 2; }

# Nodes know each other by a secret of this job; srun hands the environment on, and no command line shows it.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export RAY_AUTH_TOKEN MASTER_ADDR
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export WORLD_SIZE=$SLURM_JOB_NUM_NODES

# A node that cannot run anything ends the job at once, with the reasons in its log; warnings do not.
# --kill-on-bad-exit: a node that is lost does not leave the others waiting.
# resume_from_checkpoint: a job that was preempted (TERM comes 300 seconds before the end) goes on where it saved.
# shellcheck disable=SC2016  # the node's own shell reads the variables
srun --kill-on-bad-exit=1 bash -c '
    export RANK=$SLURM_NODEID
    roll doctor --quick --output "${OUTPUT_DIR:-output}" || [[ $? -eq 1 ]] || exit
    exec roll run "$@"
' roll "$1" resume_from_checkpoint=true "${@:2}"
