#!/usr/bin/env bash
# Headroom's front door. `./run.sh` sets up its environment and runs the default suite;
# `./run.sh --help` shows the rest, `./run.sh test` runs the tests.
#
#   HEADROOM_PYTHON=/path/to/python   use this Python with its own PyTorch instead of creating
#                                     an environment (a cluster, a vendor container)
#   HEADROOM_VENV=/path/to/folder     where to create the environment (default: .venv here)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${HEADROOM_VENV:-$here/.venv}

# Nothing is imported from the current folder, whose files may be anybody's: Python runs with -P
# throughout, and an empty entry of PYTHONPATH, which means that folder, goes.
PYTHONPATH=$(printf '%s' "${PYTHONPATH:-}" | tr ':' '\n' | { grep . || true; } | paste -sd ':' -)

say() { printf 'headroom: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }

# The first supported Python on the PATH, the default one before others; not the environment's own,
# which may be half made, and goes when it is made anew. It runs the Python code $1, if one is given.
find_python() {
    local name PATH=$PATH
    PATH=$(printf '%s' "$PATH" | tr ':' '\n' | { grep -vxF "$venv/bin" || true; } | paste -sd ':' -)
    for name in python3 python python3.13 python3.12 python3.11; do
        if supported "$name" && "$name" -P -c "${1:-pass}" >/dev/null 2>&1; then command -v "$name"; return; fi
    done
    die "no Python 3.11 to 3.13 found; install one, or name yours: HEADROOM_PYTHON=/path/to/python"
}

supported() {
    "$1" -I -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1
}

# What pyproject.toml pins, one requirement a line; $1 is an extra or nothing.
pins() {
    "$venv/bin/python" -P - "$here/pyproject.toml" "$1" <<'PY'
import sys
import tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
extra = sys.argv[2]
print(*(project["optional-dependencies"][extra] if extra else project["dependencies"]), sep="\n")
PY
}

# Creates the environment once; a changed pyproject.toml brings it up to date.
#
# It cannot be made beside and moved into place: an environment's scripts have its path in them. So
# the stamp at its end is what counts, and one without it was cut short and is made anew. A folder is
# emptied only if headroom.ours, written before anything else, says that all in it is ours.
set_up() {
    local python stamp
    stamp=$(cksum < "$here/pyproject.toml")
    if stamped "$stamp"; then return; fi
    python=$(find_python)
    "$python" -P -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python cannot create environments; install its venv package (Debian: python3-venv)"
    case $venv in
    *" "*) say "$venv has a space, and torch builds no C++ ops there; HEADROOM_VENV=/another/folder avoids that" ;;
    esac
    claim
    exec 9>>"$venv/headroom.lock"
    lock "$python"
    if stamped "$stamp"; then exec 9>&-; return; fi  # by who held the lock
    trap cut_short EXIT
    if [ "$(cat "$venv/headroom.installed" 2>/dev/null)" != "$stamp" ]; then
        begin "$python"
        install
        printf '%s' "$stamp" > "$venv/headroom.installed"
    fi
    rm -rf "$venv/torch_extensions"  # half of an op, and its lock, that an earlier set-up left
    say "step 3 of 3, some minutes: compiling DeepSpeed's ops"
    # What cannot be compiled here is told later, by the rows that need it and by doctor. In the
    # foreground: else Ctrl-C would not reach it.
    (cd "$here" && PATH=$(without_debug)$PATH timeout --foreground 1800 "$venv/bin/python" -m harness.system.probe --build shm_comm cpu_adam async_io) \
        >> "$venv/headroom.log" 2>&1 || say "some did not compile; ./run.sh doctor says which"
    printf '%s' "$stamp" > "$venv/headroom.stamp.new"
    mv "$venv/headroom.stamp.new" "$venv/headroom.stamp"
    trap - EXIT
    exec 9>&-
    say "ready"
}

stamped() { [ "$(cat "$venv/headroom.stamp" 2>/dev/null)" = "$1" ]; }

# The folder of the environment, with a sign in it that what follows there is ours.
claim() {
    local other="name another folder (HEADROOM_VENV=/path/to/folder), or a Python that has its own PyTorch (HEADROOM_PYTHON=/path/to/python)"
    if ! { mkdir -p "$venv" && [ -w "$venv" ]; } 2>/dev/null; then
        die "cannot write to $venv; $other"
    fi
    if [ -z "$(ls -A "$venv")" ]; then
        : > "$venv/headroom.ours" || die "cannot write to $venv: is its disk full?"
    elif [ ! -e "$venv/headroom.ours" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
        die "$venv is no environment, and not empty; $other"
    fi
}

# Two set-ups of one folder follow one another. Held as long as the descriptor is open, also by a
# pip that outlives a killed run.sh: two of those would write into each other.
lock() {
    local code=0
    "$1" -P -c "$LOCK" wait_not || code=$?
    if [ "$code" = 75 ]; then
        say "another set-up of $venv is going on; waiting for it"
        code=0
        "$1" -P -c "$LOCK" 2>/dev/null || code=$?
    fi
    if [ "$code" = 1 ]; then say "$venv cannot be locked; going on without a lock"; fi
}
LOCK='import errno, fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | (fcntl.LOCK_NB if sys.argv[1:] else 0))
except OSError as error:
    sys.exit(75 if error.errno in (errno.EAGAIN, errno.EACCES) else 1)'

# An environment to install into: what there is of one that is ours and was not finished goes.
begin() {
    if [ -e "$venv/headroom.stamp" ]; then
        # From here on it is neither the old one nor the new.
        rm -f "$venv/headroom.installed" "$venv/headroom.stamp"
    elif [ -e "$venv/headroom.ours" ] && [ -e "$venv/pyvenv.cfg" ]; then
        say "an earlier set-up of $venv was cut short; making it anew"
        find "$venv/" -mindepth 1 -maxdepth 1 -not -name 'headroom.*' -not -name pyvenv.cfg -exec rm -rf {} +
        rm "$venv/pyvenv.cfg"
    fi
    say "setting up $venv with $("$1" --version) (once; minutes, or as long as the download takes)"
    : > "$venv/headroom.log"
    # Also where there is one: that gives an environment without pip its pip.
    if ! "$venv/bin/python" -P -m pip --version >/dev/null 2>&1; then "$1" -P -m venv "$venv"; fi
}

# Why a set-up ended, as far as it shows; runs at any exit before its end.
cut_short() {
    local folder free
    for folder in "$venv" "${TMPDIR:-/tmp}"; do
        free=$(df -Pk "$folder" 2>/dev/null | awk 'NR == 2 { print int($4 / 1024) }')
        if [ "${free:-$ROOM_MIB}" -lt "$ROOM_MIB" ]; then
            say "the disk of $folder has $free MiB free; the environment takes up to $ENVIRONMENT_GIB GiB"
        fi
    done
    say "the set-up did not end; pip's words are in $venv/headroom.log. The same command mends it (what was downloaded is kept by pip)"
}
ROOM_MIB=1024
ENVIRONMENT_GIB=8

# pip's output, warnings included, goes to headroom.log; the end of it is shown when pip fails.
# Python compiles a module when it first imports it; most of these are never imported.
pip_install() {
    local code=0 before
    before=$({ cat "$venv/headroom.log" 2>/dev/null || true; } | wc -l)
    "$venv/bin/python" -P -m pip install --no-compile --disable-pip-version-check --progress-bar off "$@" \
        >> "$venv/headroom.log" 2>&1 || code=$?
    if [ "$code" != 0 ]; then
        say "pip failed; the end of $venv/headroom.log:"
        tail -n "+$((before + 1))" "$venv/headroom.log" | tail -n 20 >&2
    fi
    return "$code"
}

install() {
    # torch first and alone: deepspeed's build looks for it, and a later package must not pick one.
    local torch
    torch=$(pins run | grep '^torch==')
    old_driver
    say "step 1 of 3, up to 3 GiB to download: installing $torch"
    pip_install "$torch"
    pip_install setuptools wheel packaging ninja numpy psutil py-cpuinfo
    say "step 2 of 3: installing accelerate, deepspeed and the rest"
    { pins ""; pins run; pins recipes; pins test; } \
        > "$venv/requirements.txt"
    # deepspeed is built from source, its C++ ops later; told of a GPU it would want nvcc here.
    DS_ACCELERATOR=cpu DS_BUILD_OPS=0 pip_install --no-build-isolation --requirement "$venv/requirements.txt"
}

# The pinned torch is built for CUDA 13, which no driver below 580 runs.
old_driver() {
    local driver
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || return 0
    if [[ $driver =~ ^([0-9]+)\. ]] && [ "${BASH_REMATCH[1]}" -lt 580 ]; then
        say "the NVIDIA driver $driver is too old for the pinned torch (580 or newer); update it, or name a Python whose PyTorch runs here: HEADROOM_PYTHON=/path/to/python"
    fi
}

# Prints a folder and a colon for the front of PATH: a c++ there leaves out debug information, which
# nothing reads and which is a third of the time of compiling the ops. ninja sees the same command,
# so that a later load, with the usual c++, compiles nothing again.
without_debug() {
    local compiler folder=$venv/headroom.compiler
    compiler=$(command -v c++) || return 0
    mkdir -p "$folder"
    printf '#!/bin/sh\nexec "%s" "$@" -g0\n' "$compiler" > "$folder/c++"
    chmod +x "$folder/c++"
    printf '%s:' "$folder"
}

# Where DeepSpeed's ops are compiled: they belong to one environment (two that share a cache rebuild
# them in turns), and lie in it, unless it is another user's or may only be read.
ops_folder() {
    local inside=$venv/torch_extensions
    if [ ! -e "$venv" ] || [ -w "$inside" ] || { [ ! -e "$inside" ] && [ -w "$venv" ]; }; then
        printf '%s' "$inside"
    else
        printf '%s' "${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/headroom/ops-$(printf '%s' "$venv" | cksum | cut -d ' ' -f 1)"
    fi
}

# What reports, comparisons and lists need of a Python; they need no torch.
READS='import jinja2, psutil, rich, yaml'
check_reader() {
    "$1" -P - "$2" <<'PY' || exit 2
import importlib.util, sys
needed = {"jinja2": "jinja2", "psutil": "psutil", "rich": "rich", "yaml": "pyyaml"}
missing = [pip for module, pip in needed.items() if importlib.util.find_spec(module) is None]
if missing:
    print(f"headroom: {sys.executable} lacks: {', '.join(missing)}, which {sys.argv[1]} needs\n"
          f"headroom: install them with: {sys.executable} -m pip install {' '.join(missing)}",
          file=sys.stderr)
sys.exit(bool(missing))
PY
}

# A Python of the user's own: say what it lacks instead of changing it.
check_own() {
    "$1" -P - <<'PY' || exit 2
import importlib.util, sys
needed = {"torch": "torch", "accelerate": "accelerate", "deepspeed": "deepspeed",
          "transformers": "transformers", "numpy": "numpy", "sklearn": "scikit-learn",
          "psutil": "psutil", "yaml": "pyyaml", "PIL": "pillow", "rich": "rich", "ninja": "ninja",
          "jinja2": "jinja2"}
missing = [pip for module, pip in needed.items() if importlib.util.find_spec(module) is None]
hard = [name for name in missing if name not in ("deepspeed", "scikit-learn", "ninja", "transformers")]
if missing:
    print(f"headroom: {sys.executable} lacks: {', '.join(missing)} (without network access: "
          "docs/how-to/install.md)\n"
          f"headroom: install them with: {sys.executable} -m pip install {' '.join(missing)}",
          file=sys.stderr)
if missing and not hard:
    print("headroom: going on without; rows that need them will say so", file=sys.stderr)
sys.exit(bool(hard))
PY
}

# The harness is run from its sources; commands work from any folder.
search_here() {
    case $here in
    *:*) die "the path $here has a colon, which Python's search path cannot hold; move the clone to a path without one" ;;
    esac
    export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
}

# Help and the version need a bare Python alone: nothing is set up for them.
if [[ $# = 1 && $1 =~ ^(-h|--help|--version)$ ]]; then
    python=${HEADROOM_PYTHON:-}
    supported "$python" || python=$(find_python)
    search_here
    exec "$python" -P -m harness "$@"
fi

# A shell completes a command (argcomplete): nothing is set up for it.
if [ -n "${_ARGCOMPLETE:-}" ]; then
    search_here
    exec "${HEADROOM_PYTHON:-$venv/bin/python}" -P -m harness
fi

# The site needs its own packages alone, and no torch.
if [ "${1:-}" = docs ]; then
    shift
    venv=$venv-docs
    if [ ! -x "$venv/bin/mkdocs" ]; then
        say "installing mkdocs into $venv"
        "$(find_python)" -P -m venv "$venv"
        pins docs | "$venv/bin/python" -P -m pip install -q --no-compile -r /dev/stdin
    fi
    cd "$here"
    NO_MKDOCS_2_WARNING=1 "$venv/bin/python" -P -m mkdocs build --strict "$@"
    say "open site/index.html"
    exit
fi

reads=
if [[ ${1:-} =~ ^(report|compare|list)$ ]]; then reads=$1; fi
if [[ ${1:-} != test && ${2:-} =~ ^(-h|--help)$ ]]; then reads="$1 --help"; fi
if [ -n "${HEADROOM_PYTHON:-}" ]; then
    python=$(command -v "$HEADROOM_PYTHON") || die "HEADROOM_PYTHON=$HEADROOM_PYTHON does not exist"
    case $python in /*) ;; *) python=$PWD/$python ;; esac
    supported "$python" || die "HEADROOM_PYTHON=$python is no working Python 3.11 to 3.13"
    if [ -n "$reads" ]; then check_reader "$python" "$reads"; else check_own "$python"; fi
else
    python=$venv/bin/python
    export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$(ops_folder)}
fi
# ninja and accelerate of this environment before the system's.
export PATH="$(dirname "$python"):$PATH"
if [ -z "${HEADROOM_PYTHON:-}" ]; then
    # Where nothing is set up yet, any Python with what reports need will do for them.
    if [ -n "$reads" ] && [ ! -e "$venv/headroom.stamp" ]; then
        if own=$(find_python "$READS" 2>/dev/null); then python=$own; else
            say "no Python on the PATH has jinja2, psutil, rich and PyYAML, which $reads needs; setting up the environment"
            set_up
        fi
    else
        set_up
    fi
fi

# Images often forbid bytecode. Then each process would compile torch's modules anew, half of what a
# launch takes: in an environment of ours, it lies there and not beside the code.
if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ] && [ -z "${HEADROOM_PYTHON:-}" ] && [ -w "$venv" ]; then
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONPYCACHEPREFIX=$venv/pycache
fi

search_here
# What the harness starts imports nothing from its current folder either.
export PYTHONSAFEPATH=1
if [ "${1:-}" = test ]; then
    shift
    cd "$here"
    # Two files of tests at a time, in conftest's order: half of a launch is spent waiting for one
    # process's imports.
    if [[ " $* " != *" -n "* ]] && "$python" -c 'import xdist' 2>/dev/null; then
        set -- -n 2 --dist loadfile --no-loadscope-reorder "$@"
    fi
    exec "$python" -m pytest "$@"
fi
exec "$python" -m harness "$@"
