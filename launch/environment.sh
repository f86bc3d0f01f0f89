# Sourced by the scripts beside it: makes .venv, installs the pins of $1 once, sets PYTHON.
venv=${BIPHASIC_VENV:-.venv}
PYTHON=$venv/bin/python
python3=${BIPHASIC_PYTHON:-python3}
if [ ! -x "$PYTHON" ]; then
  "$python3" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $("$python3" --version) is too old: biphasic_jax needs Python 3.11 or newer (set BIPHASIC_PYTHON)" >&2
    exit 2
  }
  "$python3" -m venv "$venv"
fi
# Installed is what the stamps say: the network is needed again only when the pins change.
pins=$(cat requirements.txt "$1" | cksum)
if [ "$(cat "$venv/.installed-$1" 2>/dev/null)" != "$pins" ]; then
  echo "installing $1 into $venv"
  "$PYTHON" -m pip install --quiet --disable-pip-version-check -r "$1"
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --editable .
  echo "$pins" > "$venv/.installed-$1"
  # What the tests need includes what a run needs.
  cat requirements.txt requirements.txt | cksum > "$venv/.installed-requirements.txt"
fi
export PYTHON
