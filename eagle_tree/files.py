"""Files that are whole or absent: written under a temporary name, then renamed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save
from torch import Tensor


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; what was written there takes its place on leaving.

    If the block raises (a full disk, an interrupt), the temporary file is removed and `path` is as it was. The
    name carries the process id, so that processes which write the same file do not meet.

    Raises:
        OSError: a file that cannot be written, with the path and the reason.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: str | Path, fields: dict, default: Callable[[object], object] | None = None) -> None:
    """Write fields as indented JSON; `default` (such as `str`) makes text of what JSON has no type for."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(fields, indent=2, default=default) + "\n")


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """The object in a JSON file that must have these keys.

    Raises:
        ValueError: the file is truncated or damaged, or another.
    """
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is truncated or damaged: {error}") from None
    if not isinstance(fields, dict) or (missing := [key for key in keys if key not in fields]):
        raise ValueError(f"{path} holds no object{f' with {missing[0]}' if isinstance(fields, dict) else ''}")
    return fields


def write_table(table: pa.Table, path: str | Path) -> None:
    """Write a Parquet file."""
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def write_tensors(path: str | Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file, readable for whom the system lets read new files (`save_file` lets the owner alone)."""
    with replacing(path) as temporary:
        temporary.write_bytes(save(tensors))


def write_state(path: str | Path, state: dict) -> None:
    """Write tensors, numbers and strings in nested containers by `torch.save`; read with `weights_only=True`.

    Raises:
        OSError: it cannot be written (torch raises RuntimeError for that).
    """
    with replacing(path) as temporary:
        try:
            torch.save(state, temporary)
        except RuntimeError as error:
            raise OSError(f"cannot write {path}: {error}") from error
