#!/usr/bin/env bash
# What are later nodes, later siblings and deeper nodes worth? Resumable: what is there is not done again.
# usage: run.sh [small]     WORK: where recordings are (experiments/work)
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
work="$(realpath -m "${WORK:-$here/../work}")"; out=()
[ "${1:-}" != small ] || { work+=/small; out=("$work/06_diminishing_returns"); }
"$here/../recordings.sh" "$@"
python "$here/analyse.py" "$work" "${out[@]}"
