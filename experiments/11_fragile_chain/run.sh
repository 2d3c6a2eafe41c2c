#!/usr/bin/env bash
# Is a chain as fragile as a geometric law says? Resumable: what is there is not done again.
# usage: run.sh [small]     WORK: where recordings are (experiments/work)
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
exec "$here/../reproduce.sh" "$here" "$@"
