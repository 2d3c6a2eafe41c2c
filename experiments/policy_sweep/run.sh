#!/usr/bin/env bash
# Every tree policy at every size, on the same prompts. Resumable: a step whose result is there is not done again.
# usage: run.sh [small]     small: two prompts, few tokens, two sizes, to see that all steps run
# TEMPERATURE=1 sweeps at T = 1; WORK: where intermediate results go
set -euo pipefail
cd "$(dirname "$0")"
temperature="${TEMPERATURE:-0}"
sizes="4 8 16 32 59"; prompts=null; timed=6; tokens=128; repeats=7; work="${WORK:-work}/temperature_$temperature"
if [ "${1:-}" = small ]; then
  sizes="4 8"; prompts=2; timed=2; tokens=10; repeats=1; work="$work/small"
fi
common=(data=messages "max_new_tokens=$tokens" "temperature=$temperature")
fit=(data.path="$work/fit.jsonl" "data.limit=$prompts" "${common[@]}")
judge=(data.path="$work/judge.jsonl" "${common[@]}")
[ -f "$work/judge.jsonl" ] || python ../split_prompts.py "$work"

follow() { # NAME ENTRIES [OVERRIDES]: tokens per pass along the target's texts
  [ -f "$work/$1/evaluation.json" ] || eagle-tree evaluate "run=$work/$1" "policies=[$2]" depths=1 "data.limit=$prompts" \
    "texts=$work/judge_texts.parquet" "${judge[@]}"
}
decode() { # NAME ENTRIES: tokens per second
  [ -f "$work/$1/run.json" ] || { rm -rf "${work:?}/$1"; eagle-tree bench "run=$work/$1" "compare=[$2]" \
    policy=autoregressive "data.limit=$timed" "${judge[@]}"; }
}
at() { # POLICY SIZES [FIELDS]: one entry a size
  local list=""
  for size in $2; do list+="{policy: $1, budget: $size${3:+, $3}},"; done
  echo "${list%,}"
}

# Fitted on the first half: costs, accuracies by rank, and what confidences are worth.
[ -f "$work/cost/cost.json" ] || eagle-tree calibrate "folder=$work/cost" "repeats=$repeats"
[ -f "$work/accuracy/evaluation.json" ] || eagle-tree evaluate "run=$work/accuracy" policies=[] "${fit[@]}"
[ -f "$work/nodes/run.json" ] || { rm -rf "$work/nodes"; \
  eagle-tree bench "run=$work/nodes" policy=eagle2_published compare=[] "${fit[@]}"; }
[ -f "$work/calibration/isotonic.json" ] || eagle-tree calibrate "nodes=$work/nodes" "folder=$work/calibration"

# Judged on the second half. Growth is the same for all that follow confidences: 10 candidates, 10 nodes a step, 6 levels.
measured="accuracy: $work/accuracy/accuracy.json"
chains="{policy: chain, depth: 1},{policy: chain, depth: 2},{policy: chain, depth: 4},{policy: chain, depth: 8}"
branching="{policy: specinfer, branching: [2, 1]},{policy: specinfer, branching: [2, 2, 1]}"
branching+=",{policy: specinfer, branching: [3, 2, 1, 1]},{policy: specinfer, branching: [3, 2, 2, 1, 1]}"
sequoias="$(at sequoia "$sizes" "$measured"),{policy: sequoia, $measured, budget: null, cost: $work/cost}"
large="$(at eagle2 "$sizes" "top_k: 10, depth: 5")"
lean="{policy: eagle2, budget: 4, top_k: 4, depth: 2},{policy: eagle2, budget: 8, top_k: 4, depth: 2}"
lean+=",{policy: eagle2, budget: 16, top_k: 4, depth: 2}"
rate="{policy: rate_optimal, cost: $work/cost}"
calibrated=""
for kind in temperatures isotonic; do
  path="path: $work/calibration/$kind.json"
  for size in $sizes; do
    calibrated+="{policy: calibrated, $path, policy.budget: $size, policy.top_k: 10, policy.depth: 5},"
  done
  rate+=",{policy: rate_optimal_calibrated, $path, policy.cost: $work/cost}"
done
stops=""
for size in $sizes; do
  stops+="{policy: depth_stop, policy.budget: $size, depth: 3},{policy: confidence_stop, policy.budget: $size},"
  stops+="{policy: entropy_stop, policy.budget: $size},"
done
follow chain "$chains"
follow eagle1 eagle1
follow specinfer "$branching"
follow medusa "$(at medusa "$sizes" "$measured")"
follow sequoia "$sequoias"
follow eagle2 "$large"
follow eagle2_lean "$lean"
follow opt_tree "$(at opt_tree "$sizes" "top_k: 10, width: 10, depth: 6")"
follow best_first "$(at best_first "$sizes" "batch: 10, top_k: 10, depth: 6")"
follow talon "$(at talon "$sizes" "top_k: 10, depth: 6")"
follow stops "${stops%,}"
follow calibrated "${calibrated%,}"
follow rate_optimal "$rate"

# Tokens per second of some, interleaved prompt by prompt.
some="$chains,eagle1,$sequoias,$large,$lean,$(at opt_tree "$sizes" "top_k: 10, width: 10, depth: 6"),$rate,${calibrated%,}"
decode timed "$some"
python collect.py "$work"
