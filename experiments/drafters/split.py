"""Parts of a corpus for the ablation: greedy answers, sampled answers, and a quarter of it.

python split.py CORPUS WORK STEPS
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow.parquet as pq

from eagle_tree import corpus


def main(source: Path, work: Path, steps: int) -> None:
    """Write the folders `greedy`, `sampled` and `quarter`: the last one is seen four times in so many steps of two."""
    fingerprint = pq.read_schema(corpus.shard_paths(source)[0]).metadata[b"target_fingerprint"].decode()
    sequences = corpus.load(source, fingerprint)
    parts = {
        "greedy": [one for one in sequences if one.temperature == 0],
        "sampled": [one for one in sequences if one.temperature > 0],
        "quarter": sequences[: max(2, 2 * steps // 4)],
    }
    for name, part in parts.items():
        corpus.write_shard(work / name / "shard-00000.parquet", part, fingerprint)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
