#!/usr/bin/env bash
# Prepare this clone: Debian packages, .venv, pinned Python packages, the ops. Safe to repeat: then it takes seconds.
#   bash scripts/setup.sh
# PYTHON=... chooses the interpreter (3.11 or newer). Nothing here waits in silence: a line appears at least every 15 s.
set -euo pipefail
exec >&2 # set-up is no result: the caller's stdout stays free for one
cd "$(dirname "${BASH_SOURCE[0]}")/.."
repo=$PWD
python=${PYTHON:-}
stamp=.venv/ds_vertical_setup
torch_version=$(sed -n 's/^torch==//p' constraints.txt)

say() { printf '[setup %s] %s\n' "$(date +%H:%M:%S)" "$*"; }
fail() { say "$*"; exit 1; }

# Run a command, with a sign of life while it prints nothing of its own.
visibly() {
    local what=$1 start=$SECONDS next=15 status=0 beat
    shift
    say "$what"
    # ends with its parent, and never holds the caller's pipe for more than a second
    (while sleep 1 && kill -0 $$ 2>/dev/null; do
        ((SECONDS < start + next)) || { say "  ... $what ($((SECONDS - start)) s)"; ((next += 15)); }
    done) &
    beat=$!
    "$@" || status=$?
    kill "$beat" 2>/dev/null || true
    wait "$beat" 2>/dev/null || true
    [ "$status" -eq 0 ] || fail "failed (exit $status) while: $what"
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

find_python() {
    local name
    for name in ${python:-python3.11 python3 python3.12 python3.13}; do
        if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    return 1
}

# Debian packages that are missing, by what is missing: a machine may have got the same things another way.
missing_packages() {
    local headers
    command -v c++ >/dev/null || echo g++
    command -v patch >/dev/null || echo patch  # the tests of patches/ apply them to a copy
    { command -v ip && command -v tc; } >/dev/null || echo iproute2  # for tests on two hosts of one machine
    echo '#include <libaio.h>' | c++ -E -x c++ - >/dev/null 2>&1 || echo libaio-dev
    python=$(find_python) || { echo python3 python3-dev python3-venv; return; }
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -e "$headers/Python.h" ] || echo python3-dev
}

install_packages() {
    local packages sudo=
    packages=$(missing_packages | tr '\n' ' ')
    [ -n "${packages// /}" ] || return 0
    command -v apt-get >/dev/null || fail "please install the equivalents of these Debian packages, then run this again: $packages"
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || fail "please run as root, then run this again: apt-get install $packages"
        sudo=sudo
    fi
    export DEBIAN_FRONTEND=noninteractive
    # package lists may be absent (fresh image) or outdated: ask for them only where the install does not go through
    # shellcheck disable=SC2086
    if ! visibly_try "installing Debian packages: $packages" $sudo apt-get install -y --no-install-recommends $packages; then
        visibly "fetching Debian's package lists" $sudo apt-get update
        visibly "installing Debian packages: $packages" $sudo apt-get install -y --no-install-recommends $packages
    fi
}
visibly_try() { (visibly "$@"); }

make_venv() {
    if [ -d .venv ] && ! .venv/bin/python -c "import sys; sys.exit(sys.prefix != '$repo/.venv')" 2>/dev/null; then
        say ".venv is broken or was made for another folder; making it anew"
        rm -rf .venv
    fi
    [ -d .venv ] || visibly "making .venv with $python" "$python" -m venv .venv
}

pip_install() {
    .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off "$@" |
        { grep --line-buffered -v '^Requirement already satisfied' || true; }
}

install_torch() {
    local build="torch==$torch_version+cpu"
    if has_gpu; then
        # === takes the CUDA build even where a +cpu one is on offer, which would count as newer
        build="torch===$torch_version"
    fi
    if .venv/bin/python -m pip freeze 2>/dev/null | grep -qxF "${build/===/==}"; then
        return 0
    fi
    if visibly_try "installing $build" pip_install "$build"; then
        return 0
    fi
    visibly "installing $build from PyTorch's own index" pip_install "$build" --index-url "https://download.pytorch.org/whl/cpu"
}

install_python_packages() {
    visibly "updating pip" pip_install pip -c constraints.txt
    install_torch
    # build constraints: DeepSpeed comes as a source package and is built here
    visibly "installing ds_vertical and its pinned dependencies" \
        pip_install -e '.[hf,scripts,plot,plan,dev]' -c constraints.txt --build-constraint constraints.txt
}

# What the set-up depends on; while it does not change, a later run has nothing to install.
fingerprint() {
    { cat pyproject.toml constraints.txt scripts/setup.sh; echo "$repo"; if has_gpu; then echo gpu; fi; } | sha256sum | cut -d' ' -f1
}

wanted=$(fingerprint)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || ! .venv/bin/python -c '' 2>/dev/null; then
    install_packages
    python=$(find_python) || fail "no Python 3.11 or newer; install one or name it: PYTHON=/path/to/python bash scripts/setup.sh"
    make_venv
    install_python_packages
fi
has_gpu || export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
.venv/bin/python -m ds_vertical.cli.main build-ops || fail "the ops could not be compiled; the compiler's words are above"
echo "$wanted" >"$stamp"
