#!/usr/bin/env bash
# Does choosing every tree by tokens per second beat the best fixed tree? Resumable: what is there is not done again.
# usage: run.sh [small]     by replay; what was decoded before comes into the results
#        run.sh live        decodes, with the clock: the machine must be idle, from the cost table on
#                           REPEATS (3), PROMPTS (all of the half) and TEMPERATURES ("0 1") make it shorter
# WORK: where recordings are (experiments/work)
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
[ "${1:-}" = live ] || exec "$here/../reproduce.sh" "$here" "$@"
work="$(realpath -m "${WORK:-$here/../work}")"
"$here/../recordings.sh"
python "$here/search.py" "$work"
repeats="${REPEATS:-3}"
model=("target.dtype=${DTYPE:-float32}")
data=(data=messages "data.path=$work/prompts/judge.jsonl" "data.limit=${PROMPTS:-null}" record_nodes=false "${model[@]}")
bench() { # FOLDER OVERRIDES: once; a run that was stopped begins again
  [ -f "$work/live/$1/run.json" ] || {
    rm -rf "${work:?}/live/$1"
    eagle-tree bench "run=$work/live/$1" "${data[@]}" "${@:2}"
  }
}
for number in $(seq "$repeats"); do  # in another order each time
  for temperature in ${TEMPERATURES:-0 1}; do
    bench "judge_${temperature}_$number" "compare=[$(python "$here/search.py" "$work" entries "$temperature" "$number")]" \
      policy=autoregressive max_new_tokens=128 "temperature=$temperature"
  done
done
[ -f "$work/cost_random/cost.json" ] ||
  eagle-tree calibrate "folder=$work/cost_random" drafter=random "${model[@]}"
bench random drafter=random policy=rate_optimal "policy.cost=$work/cost_random" 'compare=[autoregressive]' \
  max_new_tokens=512
python "$here/analyse.py" "$work"
