"""The page of runs: whole whatever a run lacks, safe whatever its images are called, and never the end of a run."""

import json
import os
import re
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from jcl.commands.inputs import distinct_names
from jcl.commands.pretrain import pretrain
from jcl.commands.report import _measured, collect_run, read_run, write_report
from jcl.commands.report_sample import example_views
from jcl.data import ImageData, open_data, write_shards
from jcl.report.contents import Metric, NamedImage, NeighbourRow, RunContents
from jcl.report.page import render_page
from jcl.settings.resolve import resolve
from jcl.settings.resolved import DataFacts
from jcl.settings.values import with_values
from page_tools import EVIL_CLASS, EVIL_FILE, Reader
from run_tools import QUIET
from small_runs import drawn_pixels, tiny_settings, write_image_folder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def arrays(page_runs: Path) -> RunContents:
    return collect_run(page_runs / "arrays/run", "arrays", CPU)


@pytest.fixture(scope="module")
def evil(page_runs: Path) -> RunContents:
    return collect_run(page_runs / "evil/run", "</title><script>x", CPU)


@pytest.fixture(scope="module")
def plain(page_runs: Path) -> RunContents:
    return collect_run(page_runs / "plain", "plain", CPU)


def read(paths: list[Path], file: Path) -> Reader:
    write_report(paths, file, device="cpu")
    return Reader(file.read_text(encoding="utf-8"))


def test_a_whole_run_has_every_part(page_runs: Path, arrays: RunContents) -> None:
    page = Reader(render_page([arrays]))
    sections = {"summary", "training", "quality", "invariance", "map", "neighbors", "views", "speed", "settings"}
    assert page.headings() == sections
    charts = page.data()["charts"]
    assert {"loss", "knn_top1", "lr", "similarity", "variance", "images_per_second", "map-0"} <= charts.keys()
    metrics = [json.loads(line) for line in (page_runs / "arrays/run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in metrics if line["kind"] == "train"]
    assert [point[1] for point in charts["loss"]["series"][0]["points"]] == pytest.approx(losses, rel=1e-5)
    summary = json.loads((page_runs / "arrays/run/summary.json").read_text())
    assert f"{summary['knn_top1']:.1f} %" in page.text and "kNN, k = 5" in page.text
    images = page.all("img")
    assert all(image.get("alt") for image in images) and len(images) > 40
    assert all((image["src"] or "").startswith("data:image/png") for image in images), "small images stay exact"


def test_the_untrained_network_is_where_the_chart_starts_and_no_result(arrays: RunContents) -> None:
    chart = Reader(render_page([arrays])).data()["charts"]["knn_top1"]
    first, *later = [line for line in arrays.metrics if line["kind"] == "knn"]
    assert chart["series"][0]["points"][0][:2] == [0, pytest.approx(first["knn_top1"], rel=1e-5)]
    assert chart["y"][0] <= first["chance_top1"] <= chart["y"][1] and len(chart["series"][0]["points"]) == 1 + len(
        later
    )
    started = _measured(Path("/nowhere"), [first], arrays.settings)
    assert set(started) == {Metric("untrained_knn_top1")}
    page = Reader(render_page([replace(arrays, summary=None, metrics=[first], measured=started, sample=None)]))
    assert "kNN accuracy of the frozen features –" not in page.text and "– contrastive accuracy" in page.text


def test_views_are_called_what_they_are(arrays: RunContents) -> None:
    def called(page: str) -> list[str]:
        return re.findall(r"<span>(image|(?:query|key)[ 0-9]*)</span>", page.partition('id="views"')[2])

    assert called(render_page([arrays]))[:3] == ["image", "query", "key"]
    settings = with_values(arrays.settings, {"method.num_queries": 2, "method.num_keys": 1})
    page = render_page([replace(arrays, settings=settings)])
    assert called(page)[:3] == ["image", "query 1", "query 2"]
    assert "1 key and 2 queries" in page


def test_views_are_those_of_images_of_several_classes(tmp_path: Path) -> None:
    labels = np.repeat(np.arange(8), 20)
    np.savez(tmp_path / "images.npz", x_train=drawn_pixels(160), y_train=labels)
    data = open_data(str(tmp_path / "images.npz"))
    settings, _ = resolve(tiny_settings(tmp_path / "images.npz"), DataFacts(160, 32, decoded=True))
    shown = [image for image, _ in example_views(settings, data)]
    assert len({image.label for image in shown}) == len(shown) == 6
    numbers = [int(image.name.split()[-1]) for image in shown]
    assert all(image.label == f"class {labels[number]}" for image, number in zip(shown, numbers, strict=True))
    unlabeled = example_views(settings, ImageData(data.name, replace(data.train, labels=None), None))
    spread = [int(image.name.split()[-1]) for image, _ in unlabeled]
    assert max(spread) - min(spread) > 60, "not the first images"
    local = with_values(settings, {"method.num_local_queries": 2, "views.local_size": 8})
    assert [view.shape[-1] for view in example_views(local, data)[0][1]] == [
        *[settings.views.image_size] * (settings.method.num_queries + settings.method.num_keys),
        *[8, 8],
    ]


def test_accuracy_of_each_class(page_runs: Path, arrays: RunContents, tmp_path: Path) -> None:
    stored = json.loads((page_runs / "arrays/run/classes.json").read_text())["classes"]
    images, right = sum(row["images"] for row in stored), sum(row["images"] * row["top1"] for row in stored)
    summary = json.loads((page_runs / "arrays/run/summary.json").read_text())
    assert right / images == pytest.approx(summary["knn_top1"])
    text = Reader(render_page([arrays])).text
    assert len(stored) == 3
    for row in stored:
        assert re.search(rf"{row['name']} (\d+ test images )?{row['top1']:.1f} %", text)
    many = replace(arrays, classes={f"kind {number:02}": (10, float(number)) for number in range(60, 20, -1)})
    text = Reader(render_page([many])).text
    places = [text.index(f"kind {number} 10 test images {number}.0 %") for number in (21, 22, 60, 59)]
    assert places == sorted(places) and "kind 40" not in text
    shutil.copytree(page_runs / "arrays/run", tmp_path / "run")
    for damaged in ('{"classes": [1]}', '{"classes": 3}', "[]", '{"classes": [{"name": "a", "images": 3}]}'):
        (tmp_path / "run/classes.json").write_text(damaged)
        assert not read_run(tmp_path / "run", "run").classes


def test_what_auto_became_and_why(page_runs: Path, tmp_path: Path) -> None:
    page = Reader(render_page([read_run(page_runs / "arrays/run", "run")]))
    choices = json.loads((page_runs / "arrays/run/choices.json").read_text())["choices"]
    reasons = {choice["name"]: choice["reason"] for choice in choices}
    assert f"train.lr 0.0075 {reasons['train.lr']}" in page.text and "train.precision float32" in page.text
    old = tmp_path / "old"
    shutil.copytree(page_runs / "arrays/run", old)
    (old / "choices.json").unlink()
    assert "did not record" in Reader(render_page([read_run(old, "old")])).text


def test_nothing_is_asked_of_a_network(evil: RunContents, plain: RunContents) -> None:
    text = render_page([evil, plain])
    page = Reader(text)
    for _, attributes in page.elements:
        for name in ("src", "href", "srcset", "data", "action", "poster", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttpRequest|WebSocket|import\(", text)
    policy = next(meta["content"] for meta in page.all("meta") if meta.get("http-equiv"))
    assert policy and policy.startswith("default-src 'none'; img-src data:;") and "script-src 'sha256-" in policy


def test_names_that_look_like_markup_stay_text(evil: RunContents) -> None:
    page = Reader(render_page([evil], title="</script><b>"))
    assert len(page.all("script")) == 2 and [len(page.all(tag)) for tag in ("style", "title")] == [1, 1]
    assert all("onerror" not in attributes for _, attributes in page.elements)
    name = f"{EVIL_CLASS}/{EVIL_FILE}"
    assert name in page.text and "</title><script>x" in page.text and EVIL_CLASS in page.text
    assert any(name in text for text in page.data()["charts"]["map-0"]["names"])
    assert page.data()["runs"] == ["</title><script>x"]
    assert f"{name}broken.png" in page.text and "Skipped images: 1" in page.text


def test_a_run_without_labels(plain: RunContents) -> None:
    page = Reader(render_page([plain]))
    assert {"quality", "map", "neighbors", "views", "invariance"} <= page.headings()
    assert {"RankMe", "alpha-ReQ", "LiDAR"} <= set(page.text.split()) and "linear probe, top-1" not in page.text
    assert "knn" not in page.data()["charts"] and "contrastive accuracy" in page.text
    assert "✓" not in page.text and "✗" not in page.text


def test_a_run_that_has_not_finished(page_runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "half"
    shutil.copytree(page_runs / "arrays/run", run)
    (run / "summary.json").unlink()
    (run / "backbone.safetensors").unlink()  # its newest checkpoint has the weights
    page = read([run], tmp_path / "page.html")
    assert "epoch 3.0 of 3" in page.text and f"jcl resume {run}" in page.text
    assert {"map", "neighbors"} <= page.headings()


def test_figures_that_are_no_numbers_leave_gaps(page_runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "odd"
    shutil.copytree(page_runs / "arrays/run", run)
    summary = json.loads((run / "summary.json").read_text())
    odd = {"images_per_second": None, "seconds": "long", "peak_memory_bytes": "much"}
    (run / "summary.json").write_text(json.dumps(summary | odd))
    page = Reader(render_page([read_run(run, "run")]))
    assert "peak memory" not in page.text and "training time" not in page.text


def test_a_run_that_has_only_begun(page_runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "begun"
    run.mkdir()
    shutil.copy(page_runs / "arrays/run/settings.yaml", run)
    page = read([run], tmp_path / "page.html")
    assert page.headings() == {"summary", "speed", "settings", "views"}
    assert "no step is recorded yet" in page.text and "has no checkpoint yet" in page.text


def elsewhere(run: Path, copy: Path, before: str, now: str) -> Path:
    """A copy of a run whose images are said to be elsewhere."""
    shutil.copytree(run, copy)
    settings = (run / "settings.yaml").read_text()
    assert before in settings
    (copy / "settings.yaml").write_text(settings.replace(before, now))
    return copy


def test_images_that_have_gone(page_runs: Path, tmp_path: Path) -> None:
    run = elsewhere(page_runs / "plain", tmp_path / "run", str(page_runs / "plain-images"), str(tmp_path / "images"))
    page = read([run], tmp_path / "page.html")
    assert page.headings() == {"summary", "training", "quality", "speed", "settings"}
    assert f"named {tmp_path / 'images'}" in page.text


def test_images_that_were_passed_over(page_runs: Path, tmp_path: Path) -> None:
    before, images = page_runs / "plain-images", tmp_path / "images"
    shutil.copytree(before, images)
    (images / "IMG_1.NEF").touch()
    page = read([elsewhere(page_runs / "plain", tmp_path / "run", str(before), str(images))], tmp_path / "page.html")
    assert page.text.count(".nef 1") == 1 and "Nothing unusual" not in page.text


@pytest.mark.parametrize("odd", ["NaN", "Infinity", "1" + "0" * 400, '"many"', "[1]"])
def test_figures_that_are_none_leave_gaps(page_runs: Path, tmp_path: Path, odd: str) -> None:
    shutil.copytree(page_runs / "plain", tmp_path / "run")
    names = ("seconds", "images_per_second", "peak_memory_bytes", "steps", "knn_top1", "linear_top1")
    (tmp_path / "run/summary.json").write_text("{" + ", ".join(f'"{name}": {odd}' for name in names) + "}")
    with (tmp_path / "run/metrics.jsonl").open("a") as metrics:
        metrics.write(f'{{"kind": "train", "step": 9, "epoch": 9, "loss": {odd}, "lr": {odd}}}\n')
        metrics.write(f'{{"kind": "knn", "step": 9, "epoch": {odd}, "knn_top1": {odd}}}\n')
    page = Reader(render_page([read_run(tmp_path / "run", "run")]))
    assert "Loss" in page.text and "Infinity" not in page.text and "0" * 100 not in page.text


def test_an_address_is_not_opened_again(page_runs: Path, tmp_path: Path) -> None:
    mark = tmp_path / "touched"
    location = f"pipe:touch {mark}; cat x.tar"
    run = elsewhere(page_runs / "plain", tmp_path / "run", str(page_runs / "plain-images"), location)
    page = read([run], tmp_path / "page.html")
    assert location in page.text and not mark.exists()


def test_several_runs_on_different_data(
    page_runs: Path, arrays: RunContents, evil: RunContents, plain: RunContents
) -> None:
    paths = [page_runs / "arrays/run", page_runs / "evil/run", page_runs / "plain"]
    assert distinct_names(paths) == ["arrays/run", "evil/run", f"{page_runs.name}/plain"]
    page = Reader(render_page([arrays, evil, plain], note="a <note>"))
    assert "a <note>" in page.text
    assert page.data()["runs"] == ["arrays", "</title><script>x", "plain"]
    assert "trained on different data" in page.text
    assert len([box for box in page.all("input") if box.get("name") == "run"]) == 3
    assert len(page.data()["charts"]["loss"]["series"]) == 3 and len(page.data()["charts"]["knn_top1"]["series"]) == 2
    assert {"map-0", "map-1", "map-2"} <= page.data()["charts"].keys()


def test_figures_of_other_commands(page_runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(page_runs / "arrays/run", run)
    (run / "linear.json").write_text('{"linear_top1": 71.25, "linear_top5": true, "other": 1}')
    (run / "broken.json").write_text('{"finetune_top1": 1')
    (run / "knn.json").write_text('{"knn_top1": 12.5}')  # measured later than what is in summary.json
    page = Reader(render_page([read_run(run, "run")]))
    assert "linear probe, top-1 71.2 %" in page.text and "kNN, top-1 12.5 %" in page.text
    assert "linear probe, top-5" not in page.text and "fine-tuned" not in page.text


def test_results_that_report_and_compare_repeat_do_not_replace_the_measured_ones(
    page_runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(page_runs / "arrays/run", tmp_path / "run")
    before = read_run(tmp_path / "run", "run").measured
    (tmp_path / "run/report.json").write_text('{"file": "a.html", "knn_top1": 1.0, "linear_top1": 2.0}')
    (tmp_path / "run/compare.json").write_text('{"images": 34, "halves": 100, "rankme": 3.0, "knn_top1": 4.0}')
    assert read_run(tmp_path / "run", "run").measured == before


def test_figures_measured_in_different_ways_stand_in_rows_of_their_own(page_runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(page_runs / "arrays/run", run)
    written = {
        "a": {"finetune_top1": 61.0, "labels": "100%", "from_scratch": False},
        "b": {"finetune_top1": 62.0, "labels": "10%", "from_scratch": False},
        "c": {"finetune_top1": 63.0, "labels": "20-per-class", "from_scratch": True},
        "d": {"linear_top1": 64.0, "protocol": "fast"},
        "e": {"linear_top1": 65.0, "protocol": "paper"},
        "f": {"knn_top1": 66.0, "knn_k": 3, "knn_temperature": 0.1},
        "g": {"knn_top1": 67.0, "knn_k": 5, "data": "/elsewhere/other.npz"},
    }
    for name, figures in written.items():
        (run / f"{name}.json").write_text(json.dumps(figures))
    contents = read_run(run, "run")
    assert contents.settings.record.knn_k == 5
    page = Reader(render_page([contents])).text
    assert contents.accuracy("knn_top1").value == contents.summary["knn_top1"]
    assert "kNN (k = 3), top-1 66.0 %" in page and "kNN (on other.npz), top-1 67.0 %" in page
    assert "fine-tuned, top-1 61.0 %" in page and "linear probe, top-1 64.0 %" in page
    assert "fine-tuned (10% of the labels), top-1 62.0 %" in page
    assert "fine-tuned (20-per-class labels, from scratch), top-1 63.0 %" in page
    assert "linear probe (the paper's protocol), top-1 65.0 %" in page
    assert {metric.json_name for metric in contents.measured} >= {
        "finetune_top1",
        "finetune_top1_10_percent_of_the_labels",
        "linear_top1",
        "linear_top1_the_paper_protocol",
    }


def test_equal_runs_are_looked_at_equally(page_runs: Path, arrays: RunContents, plain: RunContents) -> None:
    first, again = arrays.sample, collect_run(page_runs / "arrays/run", "again", CPU).sample
    assert first is not None and again is not None and first.knn == again.knn and len(first.knn) == 3
    assert (first.bank, first.queries, first.from_test_set) == (34, 10, True)
    assert first.spread is not None and again.spread is not None
    assert torch.equal(first.spread.similarity, again.spread.similarity)
    held_out = plain.sample
    assert held_out is not None and (held_out.bank, held_out.queries, held_out.from_test_set) == (16, 8, False)
    names = {image.name for row in held_out.neighbours for image in row.neighbours}
    assert names.isdisjoint(row.query.name for row in held_out.neighbours)


def test_unlabeled_test_images_are_not_what_accuracy_is_measured_on(tmp_path: Path) -> None:
    """As in many competitions: classes in `train`, and a flat `test`."""
    photos, said = tmp_path / "photos", Console(file=StringIO(), width=1000)
    write_image_folder(photos / "train", 24)
    (photos / "test").mkdir()
    for number, file in enumerate(sorted((photos / "train").rglob("*.png"))[:6]):
        shutil.copy(file, photos / f"test/{number}.png")
    run = pretrain(tiny_settings(photos, train__epochs=1), tmp_path / "run", console=said)
    assert run.summary["test_held_out"] and "  test images: " not in said.file.getvalue()
    assert "no labeled test images: accuracy is measured on some of the training images" in said.file.getvalue()
    contents = collect_run(run.path, "run", CPU)
    assert contents.sample is not None and not contents.sample.from_test_set and contents.sample.knn
    page = Reader(render_page([contents])).text
    assert "On all held-out images" in page and "test image" not in page.partition("Settings")[0]


def test_many_runs_of_photographs_stay_small(plain: RunContents) -> None:
    run = plain
    assert run.sample is not None and run.views is not None
    noise = torch.randint(0, 256, (3, 200, 200), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    row = NeighbourRow(NamedImage(noise, "q"), [NamedImage(noise, "n")] * 8, [0.5] * 8)
    steps = [
        {"kind": "train", "step": step, "epoch": step / 100, "loss": 1.0 / (step + 1), "lr": 0.1, "feature_std": 0.1,
         "contrastive_accuracy": 50.0 + step % 7, "positive_similarity": 0.5, "images_per_second": 100.0 + step % 9}
        for step in range(3000)
    ]  # fmt: skip
    busy: RunContents = replace(run, metrics=steps, sample=replace(run.sample, neighbours=[row] * 6))
    page = render_page([replace(busy, name=f"run {number}") for number in range(4)])
    assert len(page) < 2_700_000 and page.count("data:image/jpeg") >= 4 * 2 * 9


def test_a_run_ends_with_a_page(npz: Path, tmp_path: Path) -> None:
    said = StringIO()  # a terminal shows that the page takes a moment
    settings = tiny_settings(npz, record__report=True, train__epochs=1)
    run = pretrain(settings, tmp_path / "run", console=Console(file=said, force_terminal=True))
    page = Reader((run.path / "report.html").read_text(encoding="utf-8"))
    assert "writing the report" in said.getvalue()
    assert {"neighbors", "map", "views"} <= page.headings() and "not finished" not in page.text


def test_a_page_that_cannot_be_written_is_a_sentence(npz: Path, tmp_path: Path) -> None:
    (tmp_path / "run/report.html").mkdir(parents=True)
    said = StringIO()
    settings = tiny_settings(npz, record__report=True, train__epochs=1)
    run = pretrain(settings, tmp_path / "run", console=Console(file=said, width=500))
    assert run.summary["epochs"] == 1 and (run.path / "backbone.safetensors").exists()
    assert said.getvalue().count("report.html is a folder") == 1 and "writing" not in said.getvalue()


def test_a_class_whose_name_is_no_utf8_costs_no_page(tmp_path):
    """As shards keep it from a folder of another encoding."""
    write_image_folder(tmp_path / "photos", classes=("cats", os.fsdecode(b"b\xe4r")))
    write_shards(open_data(str(tmp_path / "photos")), tmp_path / "shards")
    run = pretrain(
        tiny_settings(tmp_path / "shards", record__report=True, train__epochs=1), tmp_path / "run", console=QUIET
    )
    assert "b?r" in (run.path / "report.html").read_text()


def test_large_numbers_of_classes_cost_no_memory(tmp_path):
    labels = np.arange(40) % 2 * 2**40  # a counter for each number up to it would take eight terabytes
    np.savez(tmp_path / "images.npz", x_train=drawn_pixels(40), y_train=labels)
    settings = tiny_settings(tmp_path / "images.npz", record__report=True, train__epochs=1)
    assert (pretrain(settings, tmp_path / "run", console=QUIET).path / "report.html").exists()
