#!/usr/bin/env bash
# The commands of the README's "Train a drafter for your own target", on a small Qwen3 that this script makes first.
# usage: run.sh CORPUS [WORK]     CORPUS: shards of the bundled target (eagle-tree corpus); WORK: where to put results
# TARGET_STEPS (600), ANSWER_TOKENS (200000) and STEPS (800) of the head make it shorter
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
source="$1"
work="${2:-second_target}"
model="$work/model"
target=(target=huggingface "target.name_or_path=$model" target.device=cpu target.dtype=float32)
[ -f "$model/config.json" ] || python "$here/make_target.py" "$source" "$model" ${TARGET_STEPS:+"$TARGET_STEPS"}
eagle-tree corpus "${target[@]}" folder="$work/corpus" sampling.answer_tokens="${ANSWER_TOKENS:-200000}"
eagle-tree train "${target[@]}" corpus="$work/corpus" folder="$work/drafter" features="$work/features" \
  head.draft_vocab_size=2048 training.sequences_per_step=4 training.steps="${STEPS:-800}"
eagle-tree evaluate "${target[@]}" drafter=checkpoint drafter.folder="$work/drafter" data.limit=12 \
  texts="$work/texts.parquet" output="$work/runs"
eagle-tree bench "${target[@]}" drafter=checkpoint drafter.folder="$work/drafter" data.limit=12 output="$work/runs"
