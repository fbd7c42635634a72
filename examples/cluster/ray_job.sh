#!/usr/bin/env bash
# A run on a Ray cluster that is there: examples/cluster/ray_job.sh http://HEAD:8265 CONFIG [key=value ...]
# CONFIG must be readable under the same path on the cluster. The dashboard of the cluster takes jobs (it needs
# `pip install 'ray[default]'`, here and there). With token authentication, have RAY_AUTH_MODE=token and RAY_AUTH_TOKEN
# (or RAY_AUTH_TOKEN_PATH) set here, as on the cluster.
set -euo pipefail
[[ $# -ge 2 ]] || { echo "usage: examples/cluster/ray_job.sh http://HEAD:8265 CONFIG [key=value ...]" >&2; exit 2; }
dashboard=$1
shift
# Ray sets RAY_ADDRESS in the job, by which the run joins the cluster and leaves it running.
exec ray job submit --address "$dashboard" -- roll run "$@"
