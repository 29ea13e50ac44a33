#!/usr/bin/env bash
# Makes .venv with everything the project needs. Usage: scripts/install.sh [auto|cpu|cuda]
# Does nothing when .venv is up to date; repairs it when an earlier run was interrupted.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH=2.13.0
VENV=.venv
LOG=$VENV/install.log
PYTORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { echo "[install] $*"; }
die() {
  echo "[install] error: $1" >&2
  exit 1
}

platform=${1:-auto}
case $platform in
  cpu | cuda) ;;
  auto) if nvidia-smi -L >/dev/null 2>&1; then platform=cuda; else platform=cpu; fi ;;
  *) die "unknown platform '$platform'; use auto, cpu or cuda (make install PLATFORM=cpu)" ;;
esac

stamp=$VENV/.installed-$platform
inputs() {
  sha256sum requirements/*.txt pyproject.toml scripts/install.sh scripts/drop_broken_packages.py
  echo "$platform $PWD"
}
wanted=$(inputs | sha256sum | cut -d ' ' -f 1)
up_to_date() { [ -x $VENV/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; }
if up_to_date; then exit 0; fi

# One install at a time in this folder; the lock goes away with the processes that hold it.
if command -v flock >/dev/null; then
  exec 9<.
  if ! flock -n 9; then
    say "waiting for another install in this folder ..."
    flock 9
    if up_to_date; then exit 0; fi
  fi
fi

[ "$(uname -s)" = Linux ] || die "Linux is needed (found $(uname -s)): the CPU build of vLLM has no wheels elsewhere"
command -v "${CXX:-g++}" >/dev/null ||
  die "no C++ compiler (${CXX:-g++}) found; torch's compiler and vLLM need one (Debian/Ubuntu: apt-get install g++)"

usable() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1; }
find_python() {
  local candidate
  for candidate in python3.11 python3 python3.12; do
    if usable "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  die "Python 3.11 (or 3.12) is needed; found neither python3.11 nor a fitting python3 \
($(python3 --version 2>/dev/null || echo 'no working python3'))"
}

# Triton compiles a small module for every kernel, when a run starts.
has_headers() {
  "$1" -c 'import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null
}
check_for_triton() {
  command -v "${CC:-gcc}" >/dev/null ||
    die "no C compiler (${CC:-gcc}) found, which Triton needs on a GPU (Debian/Ubuntu: apt-get install gcc)"
  has_headers "$1" ||
    die "no Python.h of $("$1" --version) found, which Triton needs on a GPU (Debian/Ubuntu: apt-get install python3-dev)"
}

other=$([ "$platform" = cpu ] && echo cuda || echo cpu)
if [ -e "$VENV/.installed-$other" ]; then
  say "$VENV was installed for $other; rebuilding it for $platform (the two cannot share one)"
  rm -rf $VENV
elif [ -e $VENV ]; then
  if ! { usable $VENV/bin/python && $VENV/bin/python -I scripts/drop_broken_packages.py; }; then
    say "$VENV is broken; rebuilding it"
    rm -rf $VENV
  fi
fi
if [ "$platform" = cuda ]; then check_for_triton "$([ -e $VENV ] && echo $VENV/bin/python || find_python)"; fi
if [ ! -e $VENV ]; then
  python=$(find_python)
  say "making $VENV with $("$python" --version) ..."
  "$python" -m venv $VENV || {
    rm -rf $VENV
    die "'$python -m venv' failed (Debian/Ubuntu: apt-get install python3-venv)"
  }
fi
: >"$stamp" # empty until done, but already names the platform
: >$LOG

python() { $VENV/bin/python -I "$@"; }
pip() {
  echo "+ pip $*" >>$LOG
  # Compiled below on all cores instead; pip does it on one.
  PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 python -m pip -q --no-input "$@" >>$LOG 2>&1
}
check() {
  local what=$1
  shift
  "$@" && return
  tail -n 30 $LOG >&2
  die "$what failed; the full log is $LOG. Running the same command again continues from here"
}
cpu_torch() {
  pip install --no-compile --no-deps "torch==$TORCH+cpu" ||
    pip install --no-compile --no-deps --index-url $PYTORCH_CPU_INDEX "torch==$TORCH+cpu"
}
import_check() {
  echo "+ import check" >>$LOG
  VLLM_LOGGING_LEVEL=ERROR python - "$platform" >>$LOG 2>&1 <<'PY'
import sys

import torch

if sys.argv[1] == "cuda" and torch.version.cuda is None:  # before others fail over it
    sys.exit(f"torch {torch.__version__} is a CPU build; pip found it before PyPI's CUDA build")

import monarch.actor
import renderers
import transformers
from vllm.v1.engine.llm_engine import LLMEngine
PY
}

if [ "$platform" = cpu ]; then
  say "installing torch $TORCH (CPU) ..."
  check "installing torch $TORCH for the CPU" cpu_torch
  say "installing vLLM, torchtitan, Monarch and the rest, pinned in requirements/cpu.txt ..."
  check "installing requirements/cpu.txt" pip install --no-compile --no-deps -r requirements/cpu.txt
  say "installing the development tools ..."
  check "installing requirements/dev.txt" pip install --no-compile --no-deps -r requirements/dev.txt
else
  say "installing torch $TORCH (CUDA), vLLM, torchtitan, Monarch and the rest, pinned in requirements/cuda.txt: 4 GB ..."
  check "installing requirements/cuda.txt" \
    pip install --no-compile --no-deps -r requirements/cuda.txt -r requirements/dev.txt
fi
check "installing this project" pip install --no-compile --no-deps --no-build-isolation -e .

say "compiling and checking ..."
# Library files that are no valid Python (templates) make compileall fail: no error for us.
python -m compileall -q -j 0 -x '/(tests?|testing)/' "$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')" >>$LOG 2>&1 || true
check "importing what was installed" import_check
echo "$wanted" >"$stamp"
say "done in ${SECONDS} s"
