#!/usr/bin/env bash
# Do dynamic trees yield more than static ones of as many nodes? Resumable: what is there is not done again.
# usage: run.sh [small]     WORK: where recordings are (experiments/work)
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
exec "$here/../reproduce.sh" "$here" "$@"
