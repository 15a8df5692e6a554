# shellcheck shell=bash
# What the sbatch scripts share; they source it. See one_node.sbatch for how to use them.
#
# From Slurm: SLURM_JOB_ID, SLURM_ARRAY_JOB_ID and SLURM_ARRAY_TASK_ID, SLURM_RESTART_COUNT,
# SLURM_GPUS_ON_NODE, SLURM_CPUS_PER_TASK.  From the user:
#   DRY_RUN=1         print the command of every node, start nothing; needs no Slurm
#   RANKS_PER_NODE    ranks a node; by default its GPUs
#   PYTHON            by default .venv/bin/python
#   LOGS              folder of all jobs' logs, by default logs
#   MAX_REQUEUES      a job queues itself anew at its time limit this many times, by default 20
#   STOP_GRACE_S      seconds for the last checkpoint, by default 90; USR1 comes 120 before the limit

die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

[ -f train.py ] || die "$PWD has no train.py: submit from the checkout"
if [ -n "${DRY_RUN:-}" ]; then
  SLURM_JOB_ID=${SLURM_JOB_ID:-1}
  RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
fi
[ -n "${SLURM_JOB_ID:-}" ] || die "start it with sbatch, or with DRY_RUN=1 to see its commands"
RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
[ -n "$RANKS_PER_NODE" ] ||
  die "no GPUs in this job: ask for some (--gpus-per-node), or set RANKS_PER_NODE"

# A job that starts again goes on in its run folder (resume=auto), and has logs of its own.
RUN_NAME=slurm-$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
  RUN_NAME=slurm-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi
LOG_DIR=${LOGS:-logs}/$RUN_NAME
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
  LOG_DIR=$LOG_DIR-restart-$SLURM_RESTART_COUNT
fi

PYTHON=${PYTHON:-.venv/bin/python}
# Of the processes' own threads; ranks on CPU alone are pinned to their shares besides.
threads=$((${SLURM_CPUS_PER_TASK:-$(nproc)} / RANKS_PER_NODE))
OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
export RUN_NAME LOG_DIR RANKS_PER_NODE PYTHON OMP_NUM_THREADS

# Runs a command and ends as it does; passes signals on to it.
#
# USR1 is Slurm's notice of the time limit (--signal): a file asks train.py to save everything and
# stop, and the job queues itself anew if it may; what has not stopped in time is told to end. TERM
# (preemption, scancel --full) goes to torchrun, whose ranks save and stop too, if they can within
# its 30 seconds: Slurm itself queues a preempted job anew, thanks to --requeue.
run() {
  local child timer code=0 notice=
  "$@" & # bash would handle no signal before a command in the foreground has ended
  child=$!
  trap 'notice=USR1; ask_to_stop "$child" & timer=$!' USR1
  trap 'notice=${notice:-TERM}; kill -TERM "$child" 2>/dev/null || true' TERM INT
  wait "$child" || code=$?
  while kill -0 "$child" 2>/dev/null; do # a signal came in
    code=0
    wait "$child" || code=$?
  done
  [ -z "${timer:-}" ] || kill "$timer" 2>/dev/null || true
  if [ "$code" != 0 ] && [ "$notice" = USR1 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_REQUEUES:-20}" ]; then
    echo "out of time: job $SLURM_JOB_ID is queued anew"
    scontrol requeue "$SLURM_JOB_ID"
  elif [ -n "$notice" ]; then
    echo "job $SLURM_JOB_ID ends at signal $notice" >&2
  fi
  return "$code"
}

# Asks by the file that node.sh names to train.py, and after STOP_GRACE_S by TERM.
ask_to_stop() {
  mkdir -p "$LOG_DIR"
  touch "$LOG_DIR/stop"
  sleep "${STOP_GRACE_S:-90}"
  kill -TERM "$1" 2>/dev/null || true
}
