#!/usr/bin/env bash
# Which acceptance rule, with its kind of draft, accepts most? Resumable: what is there is not done again.
# usage: run.sh [small]     WORK: where recordings are (experiments/work)
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
work="$(realpath -m "${WORK:-$here/../work}")"; out=()
[ "${1:-}" != small ] || { work+=/small; out=("$work/08_acceptance_rules"); }
"$here/../recordings.sh" "$@"
python "$here/measure.py" "$work" "$work/08_acceptance_rules" "$@"
python "$here/analyse.py" "$work" "${out[@]}"
