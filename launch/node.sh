#!/usr/bin/env bash
# One node's torchrun. The sbatch scripts start it once a node and export what it reads: NUM_NODES,
# RDZV_ENDPOINT, RUN_NAME, LOG_DIR, RANKS_PER_NODE, PYTHON.
#
# Output of rank r of a node: $LOG_DIR/<node>/<id>/attempt_0/<r>/stdout.log and stderr.log. That of
# the node's first rank goes to the job's output too.
set -euo pipefail

name=${SLURMD_NODENAME:-$(hostname)}
if [ "$NUM_NODES" = 1 ]; then
  address=localhost
  is_host=true
else
  address=$name # rank 0's is what the others look for; a node's name for itself may be another
  is_host=$([ "${SLURM_NODEID:?is set by srun}" = 0 ] && echo true || echo false)
fi
# Before the user's first override, so that theirs count; Hydra's options (--...)
# must not stand between overrides.
mine=("run.name=$RUN_NAME" resume=auto "run.stop_file=$LOG_DIR/stop")
arguments=() named=
for argument in "$@"; do
  if [[ -z $named && $argument == [!-]*=* ]]; then
    arguments+=("${mine[@]}")
    named=1
  fi
  arguments+=("$argument")
done
[ -n "$named" ] || arguments+=("${mine[@]}")

command=(
  "$PYTHON" -m torch.distributed.run
  --nnodes="$NUM_NODES" --nproc-per-node="$RANKS_PER_NODE"
  --rdzv-backend=c10d --rdzv-id="$RUN_NAME" --rdzv-endpoint="$RDZV_ENDPOINT"
  --rdzv-conf="is_host=$is_host,join_timeout=600" --local-addr="$address"
  --log-dir="$LOG_DIR/$name" --redirects=3 --tee=0:3
  train.py "${arguments[@]}"
)
if [ -n "${DRY_RUN:-}" ]; then
  printf '%s: OMP_NUM_THREADS=%s' "$name" "$OMP_NUM_THREADS"
  printf ' %q' "${command[@]}"
  echo
  exit
fi
mkdir -p "$LOG_DIR/$name"
exec "${command[@]}"
