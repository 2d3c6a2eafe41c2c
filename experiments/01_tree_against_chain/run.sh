#!/usr/bin/env bash
# Does a tree beat a chain of as many verified positions? Resumable: what is there is not done again.
# usage: run.sh [small]     WORK: where recordings are (experiments/work)
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
work="$(realpath -m "${WORK:-$here/../work}")"; out=()
[ "${1:-}" != small ] || { work+=/small; out=("$work/01_tree_against_chain"); }
"$here/../recordings.sh" "$@"
python "$here/analyse.py" "$work" "${out[@]}"
