"""What ranks leave to the launcher that started them."""

from pathlib import Path

import pytest

from jcl.distributed.group import LostContact
from jcl.distributed.launch import ERROR_FOLDER, _sentences, report_to_launcher
from jcl.errors import DataError


def test_an_error_of_a_rank_s_own_goes_first_and_half_a_sentence_is_none(tmp_path: Path, monkeypatch):
    monkeypatch.setenv(ERROR_FOLDER, str(tmp_path))
    assert report_to_launcher(LostContact("contact was lost."), 0) and report_to_launcher(
        DataError("the disk is gone."), 1
    )
    (tmp_path / "2.partial").write_text('{"rank": 2, "te')  # of one that was killed while it wrote
    assert [(each.rank, each.text) for each in _sentences(str(tmp_path))] == [
        (1, "the disk is gone."),
        (0, "contact was lost."),
    ]


def test_without_our_launcher_a_rank_speaks_for_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(ERROR_FOLDER, raising=False)
    assert not report_to_launcher(DataError("the disk is gone."), 0)
