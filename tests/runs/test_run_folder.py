import multiprocessing
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from jcl.errors import RunError
from jcl.runs.folder import RunFolder, add_skipped, new_folder, numbered_folders, read_skipped
from jcl.settings.resolve import resolve
from jcl.settings.resolved import DataFacts
from jcl.settings.schema import Settings


def test_a_run_is_created_once(tmp_path):
    folder = RunFolder(tmp_path / "a" / "b")
    assert not folder.holds_run()
    settings, _ = resolve(Settings(), DataFacts(images=1000, short_side=32, decoded=True))
    folder.create(settings)
    assert folder.holds_run() and folder.settings() == settings
    content = folder.settings_file.read_bytes()
    with pytest.raises(RunError, match=r"already holds a run.*`jcl resume"):
        folder.create(Settings(recipe="other"))
    assert folder.settings_file.read_bytes() == content


@pytest.mark.parametrize("left", ["settings.yaml", "metrics.jsonl", "checkpoints"])
def test_any_trace_of_a_run_protects_it(tmp_path, left):
    place = tmp_path / left
    place.mkdir() if left == "checkpoints" else place.write_text("")
    with pytest.raises(RunError, match="already holds"):
        RunFolder(tmp_path).create(Settings())
    assert list(tmp_path.iterdir()) == [place]


def test_a_file_in_the_way_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match="is a file"):
        RunFolder(tmp_path / "file").create(Settings())
    with pytest.raises(RunError, match="could not be written"):
        RunFolder(tmp_path / "file" / "below").create(Settings())
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_without_a_run(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RunError, match=r"(not a|no) run folder"):
            RunFolder(path).settings()


def test_new_folders_are_numbered_and_made_at_once(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/jcl-x-002").write_text("")
    (tmp_path / "runs/jcl-x-003").symlink_to("nowhere")
    wanted = tmp_path / "runs/jcl-x"
    with new_folder(wanted, numbered=True) as first, new_folder(wanted, numbered=True) as second:
        assert (first.name, second.name) == ("jcl-x-001", "jcl-x-004") and first.is_dir() and second.is_dir()
        (second / "settings.yaml").write_text("")
    assert not first.exists() and second.exists(), "only what is empty goes"
    with new_folder(tmp_path / "new/deep/jcl-x", numbered=True) as path:
        assert path == tmp_path / "new/deep/jcl-x-001" and path.is_dir()


def test_a_folder_that_was_there_stays_and_one_that_was_not_does_not_stay_empty(tmp_path):
    mine, new = tmp_path / "mine", tmp_path / "new"
    mine.mkdir()
    for wanted in (mine, new):
        with pytest.raises(KeyboardInterrupt), new_folder(wanted) as path:
            assert path == wanted
            wanted.mkdir(exist_ok=True)
            raise KeyboardInterrupt
    assert mine.is_dir() and not new.exists()


def test_where_no_folder_can_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with (
            pytest.raises(RunError, match=rf"{name} cannot be written: File exists\.$"),
            new_folder(tmp_path / name / "jcl-x", numbered=True),
        ):
            pass


def _make_folders(wanted: Path, name: str, ready: Barrier) -> None:
    ready.wait(60)
    for _ in range(40):
        with new_folder(wanted, numbered=True) as path:
            (path / name).write_text("")


def test_processes_that_start_at_the_same_moment_have_folders_of_their_own(tmp_path):
    """Each makes forty folders as fast as it can, beginning when all are ready."""
    context = multiprocessing.get_context("fork")
    ready, wanted = context.Barrier(3), tmp_path / "runs/jcl-x"
    processes = [context.Process(target=_make_folders, args=(wanted, str(number), ready)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    folders = sorted((tmp_path / "runs").iterdir())
    assert [path.name for path in folders] == [f"jcl-x-{number:03d}" for number in range(1, 121)]
    assert all(len(list(path.iterdir())) == 1 for path in folders), "no folder is shared"


def test_numbered_folders_are_those_of_their_own_name_last_first(tmp_path):
    assert numbered_folders(tmp_path / "missing", "jcl-x") == []
    for name in ("jcl-x-001", "jcl-x-2024-001", "jcl-x-001-kept", "jcl-xy-005", "jcl-x-999", "jcl-x-1000"):
        (tmp_path / name).mkdir()
    names = [path.name for path in numbered_folders(tmp_path, "jcl-x")]
    assert names == ["jcl-x-1000", "jcl-x-999", "jcl-x-001"]


def test_a_list_that_is_not_there_is_empty_and_none_is_written_for_nothing(tmp_path):
    assert read_skipped(tmp_path / "skipped.txt") == {} == add_skipped(tmp_path / "skipped.txt", {})
    assert not list(tmp_path.iterdir())


def test_what_is_met_later_is_added(tmp_path):
    file = tmp_path / "skipped.txt"
    add_skipped(file, {"b.png": "it is empty"})
    together = {"a.png": "no image", "b.png": "it is torn"}
    assert add_skipped(file, together) == together == read_skipped(file)
    assert file.read_text() == "a.png\tno image\nb.png\tit is torn\n"
    assert add_skipped(file, {}) == together


def test_odd_names_stay_on_their_line(tmp_path):
    file = tmp_path / "skipped.txt"
    odd = {"a\nb.png": "no image", "tab\t.png": "x", "line\u2028.png": "y", "return\r.png": "two\nlines"}
    first = add_skipped(file, odd)
    assert len(first) == 4 == len(file.read_text().splitlines())
    assert add_skipped(file, odd) == first


def test_a_long_list_may_be_read_in_part(tmp_path):
    add_skipped(tmp_path / "skipped.txt", {f"{number}.png": "no image" for number in range(5)})
    assert list(read_skipped(tmp_path / "skipped.txt", max_chars=32)) == ["0.png", "1.png"]
