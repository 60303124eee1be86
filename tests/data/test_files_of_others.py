"""Datasets, tokenizers and folders of others: no code of theirs runs, nothing hangs, and each gets one sentence."""

import os

import pytest

from runtime.data import download


@pytest.mark.parametrize("python_path", ["", ".", f"{os.pathsep}/nowhere"], ids=["none", "relative", "empty entry"])
def test_pip_is_not_imported_from_the_working_directory(tmp_path, monkeypatch, python_path):
    mark = tmp_path / "mark"
    (tmp_path / "pip.py").write_text(f"open({str(mark)!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", python_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # it fails without asking anybody
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    _, read = download.wheel("no-such-package==1", [])
    with pytest.raises(OSError, match="No matching distribution found for no-such-package==1"):
        read()
    assert not mark.exists()
