#!/usr/bin/env bash
# Records what the notebooks read, and puts it into notebooks/data/: twelve bundled prompts, 64 tokens each, the bundled
# EAGLE-3 head, float32. Resumable: a step whose result is in runs/notebooks is not done again. Some minutes in all.
set -euo pipefail
cd "$(dirname "$0")/.."
work="${WORK:-runs/notebooks}"
texts=(data.limit=12 max_new_tokens=64 target.dtype=float32)
tree=(policy=eagle2 policy.top_k=6 policy.depth=4)

# 01 and 02: decoding at temperature 1, every pass and every node of a tree and of a chain.
if [ ! -f "$work/decoded/run.json" ]; then
  rm -rf "${work:?}/decoded"
  eagle-tree bench run="$work/decoded" temperature=1 "${texts[@]}" "${tree[@]}" policy.budget=24 \
    "compare=[{policy: chain, depth: 4}]"
fi

# 03 and 04: what the drafter says along the greedy texts, for trees of two shapes and for chains. Goes on where it stopped.
eagle-tree trace folder="$work/trace" "${texts[@]}" "${tree[@]}" \
  "compare=[{policy: chain, depth: 6}, {policy: eagle2, top_k: 4, depth: 2}]"

# 03 and 04: what a pass takes on the machine at hand.
[ -f "$work/cost/cost.json" ] || eagle-tree calibrate folder="$work/cost" target.dtype=float32

# 03: chains and trees of every size on that trace, and the policy that chooses depth and size by itself; in the time of
# this machine, and in that of a modelled GPU with a larger model.
listed=""
for depth in 1 2 3 4 6; do listed+="{policy: chain, depth: $depth}, "; done
for budget in 4 8 12 20; do listed+="{policy: eagle2, top_k: 4, depth: 2, budget: $budget}, "; done
for budget in 4 8 12 16 24 32 48 59; do listed+="{policy: eagle2, top_k: 6, depth: 4, budget: $budget}, "; done
replay() { # FOLDER COST…
  [ ! -f "$work/$1/run.json" ] || return 0
  rm -rf "${work:?}/$1"
  eagle-tree replay run="$work/$1" trace="$work/trace" "${@:2}" \
    policy=rate_optimal policy.top_k=6 policy.depth=4 "compare=[${listed%, }]"
}
replay replayed cost=measured cost.folder="$work/cost"
replay replayed_h100 cost=h100_8b

# Tables alone: the verbs' own figures and the trace's texts (they are in its parts, too) stay behind.
rm -rf notebooks/data
mkdir notebooks/data
cp -r "$work"/{decoded,trace,cost,replayed,replayed_h100} notebooks/data
rm -f notebooks/data/*/*.png notebooks/data/trace/texts.parquet
du -ab notebooks/data | tail -n 1
