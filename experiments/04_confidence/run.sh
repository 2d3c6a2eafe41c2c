#!/usr/bin/env bash
# Does the drafter's confidence say how likely a node is to be accepted? Resumable: what is there is not done again.
# usage: run.sh [small]     WORK: where recordings are (experiments/work)
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
work="$(realpath -m "${WORK:-$here/../work}")"; out=()
[ "${1:-}" != small ] || { work+=/small; out=("$work/04_confidence"); }
"$here/../recordings.sh" "$@"
python "$here/analyse.py" "$work" "${out[@]}"
