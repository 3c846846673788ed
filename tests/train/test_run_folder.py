import pytest

from jcl.errors import RunError
from jcl.settings import Settings
from jcl.train.folder import RunFolder, free_folder, newest_folder


def test_a_run_is_created_once(tmp_path):
    folder = RunFolder(tmp_path / "a" / "b")
    assert not folder.holds_run()
    folder.create(Settings())
    assert folder.holds_run() and folder.settings() == Settings()
    content = folder.settings_file.read_bytes()
    with pytest.raises(RunError, match=r"already holds a run and is left as it is; continue it with `jcl resume"):
        folder.create(Settings(recipe="other"))
    assert folder.settings_file.read_bytes() == content


@pytest.mark.parametrize("left", ["settings.yaml", "metrics.jsonl", "checkpoints"])
def test_any_trace_of_a_run_protects_it(tmp_path, left):
    place = tmp_path / left
    place.mkdir() if left == "checkpoints" else place.write_text("")
    what = "a run and is left" if left == "settings.yaml" else "what another command trained and is left"
    with pytest.raises(RunError, match=f"already holds {what} as it is"):
        RunFolder(tmp_path).create(Settings())
    assert list(tmp_path.iterdir()) == [place]


def test_a_file_in_the_way_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match="is a file; give the run a folder"):
        RunFolder(tmp_path / "file").create(Settings())
    with pytest.raises(RunError, match="cannot be written"):
        RunFolder(tmp_path / "file" / "below").create(Settings())
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_without_a_run(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RunError, match="holds no run"):
            RunFolder(path).settings()


def test_free_folders_are_numbered(tmp_path):
    assert free_folder(tmp_path, "jcl-x") == tmp_path / "jcl-x-001"
    (tmp_path / "jcl-x-001").mkdir()
    (tmp_path / "jcl-x-002").write_text("")
    assert free_folder(tmp_path, "jcl-x") == tmp_path / "jcl-x-003"


def test_the_newest_folder_is_the_last_of_its_own_name(tmp_path):
    assert newest_folder(tmp_path / "missing", "jcl-x") is None
    for name in ("jcl-x-001", "jcl-x-2024-001", "jcl-x-001-kept", "jcl-xy-005"):
        (tmp_path / name).mkdir()
    newest = newest_folder(tmp_path, "jcl-x")
    assert newest is not None and newest.path.name == "jcl-x-001"
    for name in ("jcl-x-999", "jcl-x-1000"):
        (tmp_path / name).mkdir()
    newest = newest_folder(tmp_path, "jcl-x")
    assert newest is not None and newest.path.name == "jcl-x-1000"
