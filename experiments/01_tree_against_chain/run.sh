#!/usr/bin/env bash
# Does a tree beat a chain of as many verified positions? Resumable: what is there is not done again.
# usage: run.sh [small]     WORK: where recordings are (experiments/work)
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
exec "$here/../reproduce.sh" "$here" "$@"
