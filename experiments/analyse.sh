#!/usr/bin/env bash
# A numbered experiment that is an analysis of the shared recordings: makes them where they are not there, then analyses.
# usage: analyse.sh FOLDER [small]     FOLDER: the experiment's; WORK: where recordings are (experiments/work)
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
folder="$(cd "$1" && pwd)"
work="$(realpath -m "${WORK:-$here/work}")"; out=()
[ "${2:-}" != small ] || { work+=/small; out=("$work/$(basename "$folder")"); }
"$here/recordings.sh" "${@:2}"
python "$folder/analyse.py" "$work" "${out[@]}"
