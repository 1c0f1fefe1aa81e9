# Sourced by the other scripts: enters a virtual environment that has the package and what it needs.
# An active environment is used as it is found; otherwise .venv is made in the repository.
# MOEFLUX_BACKEND chooses MLX's Linux build: cpu (default) or cuda13. macOS uses Metal and needs neither.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

is_new_enough() {
  command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

find_python() {
  local name
  for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
    if is_new_enough "$name"; then
      echo "$name"
      return
    fi
  done
  echo "error: Python 3.10 or newer is needed${PYTHON:+, and PYTHON is $PYTHON}; set PYTHON to one" >&2
  return 1
}

# has_installed WANTED EXTRA...: whether WANTED has been installed with these extras, also among others.
has_installed() {
  local wanted="$1" stamp extra
  shift
  for stamp in "$VIRTUAL_ENV"/.moeflux-*; do
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] || continue
    for extra in "$@"; do
      case "-${stamp##*/.moeflux-}-" in *"-$extra-"*) ;; *) continue 2 ;; esac
    done
    return 0
  done
  return 1
}

# enter_environment EXTRA...: installs the package, editable, with these extras, unless nothing has changed.
enter_environment() {
  local extras="$*" target=. python stamp wanted backend="${MOEFLUX_BACKEND:-cpu}"
  case "$backend" in cpu | cuda13) ;; *)
    echo "error: MOEFLUX_BACKEND is $backend; expected cpu or cuda13" >&2
    return 1
  esac
  if [ -z "${VIRTUAL_ENV:-}" ]; then
    if [ ! -f .venv/bin/activate ]; then # also where Debian's python3 without python3-venv left a part
      python="$(find_python)"
      "$python" -m venv --clear .venv
    fi
    # shellcheck disable=SC1091
    source .venv/bin/activate
  fi
  if ! is_new_enough python; then
    echo "error: Python 3.10 or newer is needed; the one of $VIRTUAL_ENV is older" >&2
    return 1
  fi
  if [ "$(uname)" = Linux ]; then extras="$extras $backend"; fi
  stamp="$VIRTUAL_ENV/.moeflux-$(echo "$extras" | tr ' ' '-')"
  wanted="$(pwd) $(cat pyproject.toml setup.py native/* | cksum)"
  # shellcheck disable=SC2086
  if ! has_installed "$wanted" $extras; then
    echo "installing into $VIRTUAL_ENV; the first time, this takes one to three minutes ..." >&2
    if [ -n "$extras" ]; then target=".[$(echo $extras | tr ' ' ',')]"; fi
    # uv makes environments without pip.
    python -m pip --version >/dev/null 2>&1 || python -m ensurepip >/dev/null
    python -m pip install --quiet --disable-pip-version-check -e "$target"
    case " $extras " in *" test "*) # of mlx-vlm only files of encoders are run, which need none of what it installs
      python -m pip install --quiet --disable-pip-version-check --no-deps "$(grep -o 'mlx-vlm==[0-9.]*' pyproject.toml)" ;;
    esac
    echo "$wanted" >"$stamp"
  fi
}
