"""Files that are whole or absent: written under a temporary name, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
