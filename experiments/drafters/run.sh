#!/usr/bin/env bash
# Train the three heads that ship, and judge them on MT-bench's first turns. Resumable.
# usage: run.sh QUESTIONS      QUESTIONS: spec_bench.jsonl or MT-bench's question.jsonl; its prompts are kept out of training
set -euo pipefail
cd "$(dirname "$0")"
questions="$1"
work="${WORK:-work}"
dtype="${DTYPE:-auto}"
common=(corpus=corpus "features=$work/features" "target.dtype=$dtype" data@exclude=questions "exclude.path=$questions")

eagle-tree corpus folder=corpus sampling.answer_tokens="${ANSWER_TOKENS:-1500000}" sampling.rows=256 "target.dtype=$dtype"

# The dear part of a training-time test is its self-fed steps: two of them while every text is new, four after that.
eagle-tree train "${common[@]}" folder="$work/eagle3_first" head.draft_steps=2 training.steps="${FIRST_STEPS:-3600}"
eagle-tree train "${common[@]}" folder="$work/eagle3" head.initial="$work/eagle3_first" \
  training.steps="${STEPS:-5400}" training.learning_rate=0.0006
# Logits of the whole vocabulary are the dear part of the other two: a share of the positions is drawn at every step.
eagle-tree train "${common[@]}" folder="$work/eagle2" head=eagle training.learnt_share=0.5 training.steps="${STEPS:-3600}"
eagle-tree train "${common[@]}" folder="$work/medusa" head=medusa training.learnt_share=0.25 training.steps="${STEPS:-3600}"

trees="{policy: eagle2, budget: 24, top_k: 10, depth: 6},{policy: eagle2, budget: 59, top_k: 10, depth: 7}"
for head in eagle3 eagle2 medusa; do
  [ -f "$work/$head/evaluation/evaluation.json" ] && continue
  eagle-tree evaluate drafter=checkpoint "drafter.folder=$work/$head" "run=$work/$head/evaluation" \
    data=questions "data.path=$questions" data.limit=80 "texts=$work/mt_bench.parquet" target.dtype=float32 \
    "policies=[{policy: chain, depth: 5},eagle1,$trees]"
done
python collect.py "$work" > results.csv
