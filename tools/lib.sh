# Shared by the scripts in tools/. To be sourced by bash; the caller has set -euo pipefail.
#
#   root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
#   . "$root/tools/lib.sh"
#   install_missing "${build_packages[@]}"       # Debian packages, only those that are not there
#   ensure_torch                                 # LIBTORCH_ROOT, and torchrun on PATH
#   configure_and_build "$root/build" -DREBIND_BUILD_TESTS=ON -- rebind_unit
#
# Python packages lie outside the clone, in ${REBIND_DEPS:-${XDG_CACHE_HOME:-~/.cache}/rebind}: a second clone installs nothing.
# With LIBTORCH_ROOT set to a LibTorch (an unpacked zip, say) that one is used and no Python package is installed.
# shellcheck shell=bash disable=SC2154  # root: the caller's

torch_version=2.11.0
deps="${REBIND_DEPS:-${XDG_CACHE_HOME:-$HOME/.cache}/rebind}"
torch_venv="$deps/venv-torch-$torch_version"

# Debian 12 and Ubuntu 24.04 have them under the same names. "command:package": not needed if the command is there.
# Their users set the arrays after sourcing this file.
# shellcheck disable=SC2034
build_packages=(g++:g++ cmake:cmake ninja:ninja-build ccache:ccache libgloo-dev libabsl-dev nlohmann-json3-dev)
# shellcheck disable=SC2034
test_packages=(catch2 libbenchmark-dev)

say() { printf '== %s\n' "$*" >&2; }

fail() {
  printf '%s: error: %s\n' "${0##*/}" "$1" >&2
  shift
  (($# == 0)) || printf '  %s\n' "$@" >&2
  exit 1
}

# is_installed PACKAGE | COMMAND:PACKAGE
is_installed() {
  case "$1" in
    *:*) command -v "${1%%:*}" >/dev/null 2>&1 ;;
    *) [[ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" == installed ]] ;;
  esac
}

as_root() {
  if ((EUID == 0)); then "$@"; else sudo "$@"; fi
}

# install_missing PACKAGE ...: as above.
install_missing() {
  local package missing=()
  for package in "$@"; do
    is_installed "$package" || missing+=("${package##*:}")
  done
  ((${#missing[@]} > 0)) || return 0
  command -v apt-get >/dev/null 2>&1 ||
    fail "missing: ${missing[*]}" "There is no apt-get to install them with (Debian 12 and Ubuntu 24.04 have these names)." \
      "Install them by hand and run this again."
  ((EUID == 0)) || command -v sudo >/dev/null 2>&1 ||
    fail "missing: ${missing[*]}" "Neither root nor sudo. As root: apt-get install ${missing[*]}"
  say "installing ${missing[*]}"
  as_root apt-get update -qq || fail "apt-get update failed" "It is needed to install: ${missing[*]}"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2 ||
    fail "apt-get could not install: ${missing[*]}" "On Ubuntu some of them are in the component 'universe'."
}

# The torch folder of the environment, if pip finished with it.
installed_torch_root() {
  [[ -x "$torch_venv/bin/python3" ]] || return 1
  "$torch_venv/bin/python3" - "$torch_version" <<'PYTHON' 2>/dev/null
import importlib.metadata as metadata, importlib.util, sys
complete = all(metadata.distribution(name).read_text("RECORD") for name in ("torch", "numpy"))
if not complete or metadata.version("torch") != sys.argv[1]: sys.exit(1)
print(importlib.util.find_spec("torch").submodule_search_locations[0])
PYTHON
}

usable_python() {
  command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null
}

install_torch() {
  local python=python3
  if ! usable_python "$python"; then
    install_missing python3 python3-venv
    python=/usr/bin/python3
    usable_python "$python" || fail "torch $torch_version needs a Python from 3.10 to 3.14 with venv" \
      "$python is $("$python" --version 2>&1 || echo missing)."
  fi
  say "installing torch $torch_version into $torch_venv (about 5 GB)"
  mkdir -p "$deps"
  # Two first runs at once must not write into each other's environment.
  (
    flock 9
    installed_torch_root >/dev/null && exit 0
    rm -rf "$torch_venv"
    "$python" -m venv "$torch_venv"
    "$torch_venv/bin/pip" install --quiet --disable-pip-version-check --no-input "torch==$torch_version" numpy
  ) 9>"$deps/lock" >&2 || fail "pip could not install torch $torch_version and numpy into $torch_venv" \
    "Or set LIBTORCH_ROOT to a LibTorch $torch_version that you have."
}

# Sets and exports LIBTORCH_ROOT; puts the environment's torchrun on PATH.
ensure_torch() {
  if [[ -z "${LIBTORCH_ROOT:-}" ]]; then
    LIBTORCH_ROOT="$(installed_torch_root)" || {
      install_torch
      LIBTORCH_ROOT="$(installed_torch_root)" || fail "the Python environment $torch_venv is broken" "Remove it and run this again."
    }
  fi
  export LIBTORCH_ROOT
  [[ ! -x "$torch_venv/bin/torchrun" ]] || export PATH="$torch_venv/bin:$PATH"
}

# As many compilers as there are cores and memory for: one takes up to 2.2 GB while it makes a precompiled header.
job_count() {
  local cores available_kb
  cores="$(nproc)"
  available_kb="$(awk '/^MemAvailable:/ {print $2}' /proc/meminfo)"
  local by_memory=$((available_kb / (2200 * 1024)))
  ((by_memory < cores)) && cores=$by_memory
  echo $((cores > 0 ? cores : 1))
}

# configure_and_build FOLDER [CMAKE OPTION ...] [-- TARGET ...]
configure_and_build() {
  local folder="$1" options=() targets=()
  shift
  while (($# > 0)) && [[ "$1" != -- ]]; do
    options+=("$1")
    shift
  done
  (($# == 0)) || targets=(--target "${@:2}")
  # A folder that is configured already keeps its generator.
  [[ -e "$folder/CMakeCache.txt" ]] || options+=(-G Ninja)
  cmake -S "$root" -B "$folder" "-DLIBTORCH_ROOT=$LIBTORCH_ROOT" "${options[@]}" >&2 ||
    fail "cmake could not configure $folder" "If it was configured for something else, remove it and run this again."
  cmake --build "$folder" --parallel "${REBIND_JOBS:-$(job_count)}" "${targets[@]}" >&2 || fail "the build in $folder failed"
}

# install_rebind BUILD-FOLDER: into its install/, where tools/env lets find_package(rebind) find it.
install_rebind() {
  cmake --install "$1" --prefix "$1/install" >/dev/null || fail "cmake could not install from $1 into $1/install"
}
