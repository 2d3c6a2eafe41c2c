#!/usr/bin/env bash
# Does acceptance depend on the position in the tree, and there on the context? Resumable: what is there is not done again.
# usage: run.sh [small]     WORK: where recordings are (experiments/work)
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
exec "$here/../reproduce.sh" "$here" "$@"
