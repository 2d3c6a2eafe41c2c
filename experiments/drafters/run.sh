#!/usr/bin/env bash
# Train the three heads that ship, and judge them on MT-bench's first turns. Resumable.
# usage: run.sh QUESTIONS      QUESTIONS: spec_bench.jsonl or MT-bench's question.jsonl; its prompts are kept out of training
set -euo pipefail
cd "$(dirname "$0")"
questions="$1"
work="${WORK:-work}"
held_out=(data@exclude=questions "exclude.path=$questions")
eagle-tree corpus folder=corpus sampling.answer_tokens="${ANSWER_TOKENS:-1500000}" "target.dtype=${DTYPE:-bfloat16}"
for head in eagle3 eagle medusa; do
  eagle-tree train "head=$head" corpus=corpus "folder=$work/$head" "features=$work/features" "${held_out[@]}" \
    "training.steps=${STEPS:-8000}" "target.dtype=${DTYPE:-bfloat16}"
  trees="{policy: eagle2, budget: 24, top_k: 10, depth: 6},{policy: eagle2, budget: 59, top_k: 10, depth: 7}"
  eagle-tree evaluate drafter=checkpoint "drafter.folder=$work/$head" "run=$work/$head/evaluation" \
    data=questions "data.path=$questions" data.limit=80 "texts=$work/mt_bench.parquet" target.dtype=float32 \
    "policies=[{policy: chain, depth: 5},eagle1,$trees]"
done
python collect.py "$work" > results.csv
