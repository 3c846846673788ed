"""`jcl report`: which pages it writes, replaces and refuses."""

import html
import json
import shutil
from pathlib import Path

import pytest

from page_tools import Reader, small_run
from small_runs import write_image_folder


def test_the_command(call, page_runs: Path, tmp_path: Path) -> None:
    file, figures = tmp_path / "out/page.html", tmp_path / "page.json"
    runs, names = [page_runs / "arrays/run", page_runs / "plain"], ["--name", "MoCo v2", "--name", "JCL"]
    code, out, err = call("report", *runs, *names, "-o", file, "--json", figures)
    assert (code, err) == (0, "") and str(file) in out and file.stat().st_size < 5_000_000
    written = json.loads(figures.read_text())
    assert {"moco_v2_knn_top1", "moco_v2_sample_knn_top1_k1", "jcl_mean_view_similarity"} <= written.keys()
    assert written["bytes"] == file.stat().st_size and written["jcl_finished"] is True
    assert html.escape("MoCo v2 and JCL") in file.read_text(encoding="utf-8")
    copy = tmp_path / "copy"
    shutil.copytree(page_runs / "plain", copy)
    own = copy / "report.html"
    own.write_text("old")
    assert call("report", copy, "-o", own)[0] == 0 and own.stat().st_size > 1000, "a run's own page is made anew"
    for arguments in ([copy, "-o", file], [*runs, "-o", own]):
        before = Path(arguments[-1]).read_bytes()
        code, _, err = call("report", *arguments)
        assert code == 1 and "--force" in err
        assert Path(arguments[-1]).read_bytes() == before
    assert call("report", copy, "-o", file, "--force")[0] == 0


def test_a_page_that_shows_more_than_can_be_made_now_stays(call, tmp_path: Path) -> None:
    photos = write_image_folder(tmp_path / "photos")
    own = small_run(photos, tmp_path / "run", record__report=True, train__epochs=1).path / "report.html"
    whole = own.read_bytes()
    photos.rename(tmp_path / "elsewhere")
    for options in ([], ["-o", own]):
        code, out, err = call("report", own.parent, *options, "--json", "page.json")
        assert code == 1 and out == "" and err.count("\n") == 1 and own.read_bytes() == whole
        assert all(part in err for part in (str(own), "map, neighbors and views", str(photos), "--force"))
    assert not Path("page.json").exists()
    code, out, _ = call("report", own.parent, "-o", "poor.html")
    assert code == 0 and "No neighbors, map and views" in out and own.read_bytes() == whole
    assert "views" not in Reader(Path("poor.html").read_text(encoding="utf-8")).headings()
    code, out, _ = call("report", own.parent, "--force")
    assert code == 0 and "No neighbors, map and views" in out and own.read_bytes() != whole
    assert call("report", own.parent)[0] == 0, "nothing more is lost"


def test_a_page_of_a_run_whose_backbone_has_gone_keeps_what_it_shows(call, page_runs: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(page_runs / "plain", copy)
    assert call("report", copy)[0] == 0
    whole = (copy / "report.html").read_bytes()
    for path in [copy / "backbone.safetensors", *(copy / "checkpoints").iterdir()]:
        path.unlink()
    code, _, err = call("report", copy)
    assert code == 1 and "invariance, map and neighbors" in err
    assert (copy / "report.html").read_bytes() == whole


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing"], "missing"),
        (["{run}", "{run}", "-o", "page.html"], "twice"),
        (["{run}", "{plain}"], "-o FILE"),
        (["{run}", "--name", "a", "--name", "b"], "--name"),
        (["{run}", "{plain}", "--name", "a", "--name", "a", "-o", "page.html"], "--name"),
        (["{run}", "-o", "{plain}"], "is a folder"),
        (["{run}", "--device", "tpu", "-o", "page.html"], "tpu"),
    ],
)
def test_what_the_command_refuses(call, page_runs: Path, arguments: list[str], said: str) -> None:
    places = {"run": page_runs / "arrays/run", "plain": page_runs / "plain"}
    code, _, err = call("report", *(argument.format(**places) for argument in arguments))
    assert (
        code == (1 if said in ("missing", "is a folder") else 2)
        and said in err
        and err.count("\n") == 1
        and "Traceback" not in err
    )
