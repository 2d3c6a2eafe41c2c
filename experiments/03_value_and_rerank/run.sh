#!/usr/bin/env bash
# What are EAGLE-2's value and rerank worth? Resumable: what is there is not done again.
# usage: run.sh [small]     WORK: where recordings are (experiments/work)
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
exec "$here/../reproduce.sh" "$here" "$@"
