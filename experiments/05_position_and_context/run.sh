#!/usr/bin/env bash
# Does acceptance depend on the position in the tree, and there on the context? Resumable: what is there is not done again.
# usage: run.sh [small]     WORK: where recordings are (experiments/work)
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
work="$(realpath -m "${WORK:-$here/../work}")"; out=()
[ "${1:-}" != small ] || { work+=/small; out=("$work/05_position_and_context"); }
"$here/../recordings.sh" "$@"
python "$here/analyse.py" "$work" "${out[@]}"
