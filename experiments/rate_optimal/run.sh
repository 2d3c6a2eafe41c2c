#!/usr/bin/env bash
# Does choosing every tree by tokens per second beat the best fixed tree? Resumable: what is there is not done again.
# usage: run.sh [small]     small: two prompts, few tokens, to see that all steps run
set -euo pipefail
cd "$(dirname "$0")"
prompts=null; tokens=128; long=512; repeats=3; measured=7; work="${WORK:-work}"
if [ "${1:-}" = small ]; then
  prompts=2; tokens=10; long=24; repeats=2; measured=1; work="$work/small"
fi
half() { printf '%s\n' data=messages "data.path=$work/$1.jsonl" "data.limit=$prompts"; }
[ -f "$work/judge.jsonl" ] || python ../split_prompts.py "$work"
bench() { # FOLDER OVERRIDES: once; a run that was stopped begins again
  [ -f "$work/$1/run.json" ] || { rm -rf "${work:?}/$1"; eagle-tree bench "run=$work/$1" "${@:2}"; }
}

[ -f "$work/cost/cost.json" ] || eagle-tree calibrate "folder=$work/cost" "repeats=$measured"
[ -f "$work/cost_random/cost.json" ] || eagle-tree calibrate "folder=$work/cost_random" "repeats=$measured" drafter=random

# The best fixed trees, on the first half: 26 settings of (budget, top_k, depth), no budget above its pool.
fixed=""
while read -r top_k depth budgets; do
  for budget in $budgets; do fixed+="{policy: eagle2, budget: $budget, top_k: $top_k, depth: $depth},"; done
done <<'END'
2 1 4 6
2 3 4 8 12
3 2 4 6 8 12 16
4 2 6 8 12 16 24
4 3 8 12 16 24
6 3 12 16 24 32
8 4 16 24 32
END
mapfile -t data < <(half fit)
bench search "compare=[${fixed%,}]" policy=autoregressive record_nodes=false "max_new_tokens=$tokens" "${data[@]}"

# The three best, the published tree and the rate-optimal policy, on the other half, in another order each time.
mapfile -t data < <(half judge)
for number in $(seq "$repeats"); do
  listed="$(python analyse.py entries "$work" "$number")"
  bench "judge_$number" "compare=[$listed]" policy=autoregressive \
    record_nodes=false "max_new_tokens=$tokens" "${data[@]}"
done
bench random drafter=random policy=rate_optimal "policy.cost=$work/cost_random" compare=[autoregressive] \
  record_nodes=false "max_new_tokens=$long" "${data[@]}"
python analyse.py report "$work"
