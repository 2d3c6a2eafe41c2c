#!/usr/bin/env bash
# Numbered experiments: makes the shared recordings where they are not there, measures what else is to measure, analyses.
# usage: reproduce.sh FOLDER... [small]     FOLDER: an experiment's; WORK: where recordings are (experiments/work)
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
work="$(realpath -m "${WORK:-$here/work}")"; size=(); folders=("$@")
[ "${!#}" != small ] || { size=(small); work+=/small; unset 'folders[-1]'; }

script() { # PATH ARGUMENTS: for steps.py, if there is such a script
  [ ! -f "$1" ] || { printf '%q ' "" python "$@"; echo; }
}
steps() {
  "$here/recordings.sh" list "${size[@]}"
  local folder name out
  for folder in "${folders[@]}"; do
    folder="$(realpath "$folder")"; name="$(basename "$folder")"; out="$folder"
    [ -z "${size[*]}" ] || out="$work/$name"
    script "$folder/search.py" "$work" "${size[@]}"
    script "$folder/measure.py" "$work" "$work/$name" "${size[@]}"
    script "$folder/analyse.py" "$work" "$out"
  done
}
steps | python "$here/steps.py"
