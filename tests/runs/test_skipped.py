"""The list of images that could not be read."""

from jcl.runs.folder import add_skipped, read_skipped


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
    assert list(read_skipped(tmp_path / "skipped.txt", most=32)) == ["0.png", "1.png"]
