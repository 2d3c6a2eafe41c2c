#!/usr/bin/env bash
# What do calibrated confidences change? Resumable: what is there is not done again.
# usage: run.sh [small]     WORK: where recordings are (experiments/work)
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
work="$(realpath -m "${WORK:-$here/../work}")"; out=()
[ "${1:-}" != small ] || { work+=/small; out=("$work/10_calibration"); }
"$here/../recordings.sh" "$@"

policies() { # T: EAGLE-2 at some sizes and the rate-optimal tree, as drafted and calibrated; no deeper than the trace
  local kind size
  for size in 8 24 59; do printf '%s' "{policy: eagle2, budget: $size, top_k: 10, depth: 5},"; done
  for kind in temperatures isotonic; do
    for size in 8 24 59; do
      printf '%s' "{policy: calibrated, path: $work/calibration_$1/$kind.json,"
      printf '%s' " policy.budget: $size, policy.top_k: 10, policy.depth: 5},"
    done
    printf '%s' "{policy: rate_optimal_calibrated, path: $work/calibration_$1/$kind.json, policy.depth: 7},"
  done
}
for temperature in 0 1; do
  run="$work/10_calibration/replay_$temperature"
  [ -e "$run/run.json" ] || printf '%q ' "$run/replayed" replay "run=$run" "trace=$work/judge/trace_$temperature" \
    cost=measured "cost.folder=$work/cost" policy=rate_optimal policy.depth=7 "compare=[$(policies "$temperature")]" && echo
done | python "$here/../verbs.py"
python "$here/analyse.py" "$work" "${out[@]}"
