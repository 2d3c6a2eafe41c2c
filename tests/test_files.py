"""Files are whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_tree.files import replacing, write_tensors


def test_the_file_appears_only_once_it_is_whole(tmp_path: Path):
    path = tmp_path / "new folder" / "table.txt"
    with replacing(path) as temporary:
        temporary.write_text("half")
        assert not path.exists()
        temporary.write_text("whole")
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


def test_an_error_keeps_the_old_file_and_leaves_no_other(tmp_path: Path):
    path = tmp_path / "table.txt"
    path.write_text("old")
    with pytest.raises(OSError, match="No space left"), replacing(path) as temporary:
        temporary.write_text("half of the new")
        raise OSError(28, "No space left on device")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_weights_may_be_read_by_whom_other_new_files_may(tmp_path: Path):
    (tmp_path / "other").touch()
    write_tensors(tmp_path / "model.safetensors", {"weight": torch.zeros(2)})
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode
