#!/usr/bin/env bash
# Which acceptance rule accepts most, by temperature and entropy: run.sh [TEXTS]
set -euo pipefail
cd "$(dirname "$0")"
python collect.py "${1:-30}" > results.csv
