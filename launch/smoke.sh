#!/usr/bin/env bash
# The main job: from nothing to an encoder pretrained in two phases, with a report, on two cores in minutes.
#   bash launch/smoke.sh [RUNS_FOLDER]
# Needs python3 (3.11 or newer) and, for the first run, PyPI. Stopped anywhere, it goes on where it was.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh requirements.txt
runs=${1:-runs}

biphasic=("$PYTHON" -m biphasic_jax)
"${biphasic[@]}" train --config=configs/smoke.py --workdir="$runs/smoke"
"${biphasic[@]}" train --config=configs/smoke.py:mlm --workdir="$runs/smoke-mlm"
"${biphasic[@]}" report --workdir="$runs/smoke" --baseline="$runs/smoke-mlm"
