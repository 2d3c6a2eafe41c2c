#!/usr/bin/env bash
# Which head to train? Short runs that differ in one choice each, judged on the same held-out texts. Resumable.
# usage: ablate.sh [STEPS] [PROMPTS]
set -euo pipefail
cd "$(dirname "$0")"
steps="${1:-400}"
prompts="${2:-12}"
work="${WORK:-work}"
common=("corpus=${CORPUS:-corpus}" "features=$work/features" "training.steps=$steps" "target.dtype=${DTYPE:-auto}")

# name, then what differs from the default head (eagle3, 8,192 tokens, 4 self-fed steps, published taps)
choices=(
  "default"
  "vocabulary 2048|head.draft_vocab_size=2048"
  "vocabulary 4096|head.draft_vocab_size=4096"
  "1 self-fed step|head.draft_steps=1"
  "2 self-fed steps|head.draft_steps=2"
  "6 self-fed steps|head.draft_steps=6"
  "all depths weigh alike|head.step_weight=1.0"
  "taps low|head.taps=[1,8,15]"
  "taps high|head.taps=[20,25,29]"
  "taps last only|head.taps=[30]"
  "total variation 0.9, cross-entropy 0.1|head.total_variation=0.9 head.cross_entropy=0.1"
  "total variation 0.5|head.total_variation=0.5"
  "random start|head.initial=random"
  "greedy answers only|corpus=$work/greedy"
  "sampled answers only|corpus=$work/sampled"
  "a quarter of the data, four epochs|corpus=$work/quarter"
  "EAGLE-1/2|head=eagle"
  "EAGLE-1/2, cross-entropy 1|head=eagle head.cross_entropy=1.0"
  "EAGLE-1/2, no noise|head=eagle head.noise=0.0"
  "EAGLE-1/2, random start|head=eagle head.initial=random"
  "Medusa, 1 block|head=medusa"
  "Medusa, 2 blocks|head=medusa head.n_layers=2"
)

python split.py "${CORPUS:-corpus}" "$work" "$steps"
for choice in "${choices[@]}"; do
  name="${choice%%|*}"
  folder="$work/ablation/${name// /_}"
  read -ra changes <<< "$([[ "$choice" == *"|"* ]] && echo "${choice#*|}" || true)"
  [ -f "$folder/evaluation/evaluation.json" ] && continue
  eagle-tree train "${common[@]}" "${changes[@]}" "folder=$folder"
  eagle-tree evaluate drafter=checkpoint "drafter.folder=$folder" "run=$folder/evaluation" "texts=$work/texts.parquet" \
    "target.dtype=${DTYPE:-auto}" "data.limit=$prompts" max_new_tokens=96 \
    "policies=[chain,eagle1,{policy: eagle2, budget: 24, top_k: 8, depth: 4},{policy: eagle2, budget: 59, top_k: 10, depth: 6}]"
done
python collect.py "$work/ablation" > ablation.csv
