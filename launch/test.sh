#!/usr/bin/env bash
# All tests, with lint and types, in the same environment as the smoke run.
#   bash launch/test.sh [PYTEST_ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh requirements-dev.txt
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy biphasic_jax
exec "$PYTHON" -m pytest "$@"
