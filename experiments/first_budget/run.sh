#!/usr/bin/env bash
# Which EAGLE-2 size pays on this machine? One process, every policy in turn on each prompt.
# usage: run.sh [PROMPTS] [NEW_TOKENS]
set -euo pipefail
cd "$(dirname "$0")"
sizes='{policy: eagle2, budget: 6, top_k: 3, depth: 2}'
sizes+=',{policy: eagle2, budget: 8, top_k: 4, depth: 2},{policy: eagle2, budget: 10, top_k: 4, depth: 3}'
sizes+=',{policy: eagle2, budget: 12, top_k: 4, depth: 3},{policy: eagle2, budget: 16, top_k: 5, depth: 3}'
sizes+=',{policy: eagle2, budget: 24, top_k: 8, depth: 4},{policy: eagle2, budget: 32, top_k: 8, depth: 4}'
eagle-tree bench data.limit="${1:-12}" max_new_tokens="${2:-96}" output="${OUTPUT:-runs}" \
  "compare=[autoregressive,{policy: chain, depth: 2},{policy: chain, depth: 4},$sizes]" \
  policy=eagle2_published | tee /dev/stderr | tail -n 1 | python collect.py > results.csv
