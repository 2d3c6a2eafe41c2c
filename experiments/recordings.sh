#!/usr/bin/env bash
# What the numbered experiments analyse, recorded once. Resumable: a step whose result is there is not done again.
# usage: recordings.sh [list] [small]     small: two prompts a half, six tokens, into WORK/small
#                                         list: print the steps that are left, for steps.py, in place of doing them
# WORK: where recordings go (experiments/work); DTYPE: the target's (float32)
#
#   prompts/                    halves of the bundled prompts: fit.jsonl to choose and fit on, judge.jsonl to judge on
#   cost/                       what a pass costs on this machine, which must be idle then
#   accuracy_T/                 acceptance by depth and rank (fit), of which Medusa's and Sequoia's trees are made
#   fit/nodes_T, judge/nodes_T  decoded: EAGLE-2's published tree and a chain, with the target's probability of every node
#   calibration_T/              what confidences are worth (fit)
#   fit/trace_T, judge/trace_T  what the drafter says: of EAGLE-2's sizes on both halves, of all policies on the second, which
#                               the target appraises at one position a prompt (half a minute each)
#   judge/coupled_1             the same texts at T = 1, drafted for with coupled candidates
set -euo pipefail
list=false; [ "${1:-}" != list ] || { list=true; shift; }
here="$(cd "$(dirname "$0")" && pwd)"
work="$(realpath -m "${WORK:-$here/work}")"
tokens=128; prompts=null; measured=(); appraised=(trace.target_prob=true trace.positions=15)
if [ "${1:-}" = small ]; then
  work+=/small; tokens=6; prompts=2; appraised=()
  measured=(repeats=1 'positions=[1,8,60]' 'widths=[1,10]' 'contexts=[64]')
fi
mkdir -p "$work"
[ -f "$work/prompts/judge.jsonl" ] || python "$here/split_prompts.py" "$work/prompts"

step() { # DONE VERB [OVERRIDES]: for steps.py, unless the file DONE is there
  [ -e "$work/$1" ] || { printf '%q ' "$work/$1" "${@:2}"; echo; }
}
on() { # HALF T: sets data
  data=(data=messages "data.path=$work/prompts/$1.jsonl" "data.limit=$prompts" "max_new_tokens=$tokens" "temperature=$2"
    "target.dtype=${DTYPE:-float32}")
}

# Beams of other widths do not nest; shallower ones, smaller budgets, EAGLE-2 stopped early, OPT-Tree (width 10) and the
# rate-optimal tree ask nothing that EAGLE-2 of the same top_k and depth 7 does not ask. Wide beams come first: they
# answer most of what narrow ones ask, and the drafter runs where something is lacking.
sizes=""
for top_k in 10 8 6 4 3 2; do sizes+="{policy: eagle2, budget: 59, top_k: $top_k, depth: 7},"; done
coupled=""
for size in 'budget: 8, top_k: 4, depth: 3' 'budget: 24, top_k: 8, depth: 4'; do coupled+="{policy: eagle2, $size},"; done
others() { # T
  local accuracy="accuracy: $work/accuracy_$1/accuracy.json" size kind
  printf '%s' "{policy: chain, depth: 16},eagle1,{policy: medusa, $accuracy},"
  for size in 4 8 16 32 59; do
    printf '%s' "{policy: sequoia, $accuracy, budget: $size},{policy: best_first, budget: $size, depth: 8},"
  done
  for branching in '2, 1' '2, 2, 1' '3, 2, 1, 1' '3, 2, 2, 1, 1'; do
    printf '%s' "{policy: specinfer, branching: [$branching]},"
  done
  for kind in temperatures isotonic; do
    printf '%s' "{policy: calibrated, path: $work/calibration_$1/$kind.json,"
    printf '%s' " policy.budget: 59, policy.top_k: 10, policy.depth: 7},"
  done
  printf '%s' "{policy: eagle2, budget: 59, top_k: 10, depth: 5, value: false},{policy: talon, depth: 8}"
}

steps() {
  step cost/cost.json calibrate "folder=$work/cost" "target.dtype=${DTYPE:-float32}" "${measured[@]}"
  for temperature in 0 1; do
    on fit "$temperature"
    step "accuracy_$temperature/accuracy.json" evaluate "run=$work/accuracy_$temperature" 'policies=[]' "${data[@]}"
    for half in fit judge; do
      on "$half" "$temperature"
      run="$half/nodes_$temperature"
      [ -e "$work/$run/run.json" ] || rm -rf "${work:?}/$run"  # a run that was stopped begins again
      step "$run/run.json" bench "run=$work/$run" policy=eagle2_published 'compare=[{policy: chain, depth: 6}]' "${data[@]}"
    done
    step "calibration_$temperature/isotonic.json" calibrate "nodes=$work/fit/nodes_$temperature" \
      "folder=$work/calibration_$temperature"
    on fit "$temperature"
    step "fit/trace_$temperature.done" trace "folder=$work/fit/trace_$temperature" "compare=[${sizes%,}]" \
      policy=chain policy.depth=8 "texts=$work/accuracy_$temperature/texts.parquet" "${data[@]}"
    on judge "$temperature"
    step "judge/trace_$temperature.done" trace "folder=$work/judge/trace_$temperature" \
      "compare=[$sizes$(others "$temperature")]" policy=eagle2_published "${appraised[@]}" \
      "${data[@]}"
  done
  step judge/coupled_1.done trace "folder=$work/judge/coupled_1" draw.kind=coupled \
    "texts=$work/judge/trace_1/texts.parquet" "compare=[${coupled%,}]" policy=eagle2_published "${data[@]}"
}
if $list; then steps; else steps | python "$here/steps.py"; fi
