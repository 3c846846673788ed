"""Write a report: read run folders, evaluate a sample of their images, and put both on one page."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from jcl.commands.inputs import distinct_names, open_run_data
from jcl.commands.report_sample import evaluate_sample, example_views
from jcl.commands.run import read_choices, read_classes
from jcl.console import join_words, plain_names, pluralize
from jcl.data import ImageData
from jcl.data.named import KNOWN_SETS, data_warnings
from jcl.data.shards.fetch import without_secrets
from jcl.distributed.device import choose_device
from jcl.errors import DataError, JclError, RunError, SettingsError
from jcl.evaluate.baselines import Estimate, estimate
from jcl.paths import expand_user, location_path
from jcl.report.contents import Metric, RunContents
from jcl.report.page import missing_sections, render_page
from jcl.report.tables import METRICS
from jcl.runs.atomic import refuse_links, refuse_overwrite, write_atomically
from jcl.runs.folder import RunFolder, read_skipped
from jcl.runs.json_object import is_number, read_object
from jcl.runs.metrics import read_metrics
from jcl.settings.commands import ReportOptions
from jcl.settings.resolved import ResolvedSettings
from jcl.settings.schema import Settings
from jcl.settings.values import with_values

_MAX_SKIPPED = 1_000_000  # characters of skipped.txt
_REPEATS = {"file", "halves"}  # in the JSON of `jcl report` and `jcl compare`, which repeat the results of others


def report_runs(options: ReportOptions) -> tuple[Sequence[RunContents], dict[str, Any]]:
    """Check the options and write the page; see `write_report`."""
    runs, names, out = options.runs, options.name, options.out
    if names and len(set(names)) != len(runs):
        raise SettingsError(f"--name: give {pluralize(len(runs), 'different name')}, one for each run, or none.")
    if out is not None and not out.is_dir() and out.suffix.lower() not in (".html", ".htm"):
        raise SettingsError(f"--out: {out} must end in .html.")
    if out is None and len(runs) > 1:
        raise SettingsError("Use -o FILE to choose the file for a report of several runs.")
    own_page = runs[0] / "report.html"  # may be replaced without --force
    if out is not None and (len(runs) > 1 or out.resolve() != own_page.resolve()):
        refuse_overwrite(out, force=options.force)
    return write_report(
        runs, out or own_page, names=names, title=options.title, device=options.device, force=options.force
    )


def write_report(
    paths: Sequence[Path],
    file: Path,
    *,
    names: Sequence[str] = (),
    title: str | None = None,
    note: str = "",
    device: str = "auto",
    data: ImageData | None = None,
    force: bool = False,
) -> tuple[Sequence[RunContents], dict[str, Any]]:
    """Write the page of one or several runs, with `note` below the summary; `data` are their images if already open.

    Without `force`, a page is not replaced if it has sections that can no longer be made because the images are gone.
    Returns the runs, and figures for JSON; those of several runs have names that start with the name of the run.
    """
    own = file in [path / "report.html" for path in paths]  # not named by the user
    if own:
        refuse_links(file)
    started = time.perf_counter()
    target = choose_device(device)
    if file.is_dir():
        raise RunError(f"{file} is a folder; give a file name such as {file / 'report.html'}.")
    named = zip(paths, names or distinct_names(paths), strict=True)
    runs = [collect_run(path, name, target, data) for path, name in named]
    page = render_page(runs, title, note)
    old_page = file.read_text(encoding="utf-8", errors="replace") if file.is_file() and not force else ""
    if lost := missing_sections(old_page, page):
        reasons = " ".join(reason for run in runs for reason in run.missing)
        raise RunError(f"A new {file} would lack {join_words(lost)}; use -o FILE or --force. {reasons}")
    content = page.encode(errors="replace")  # folder names may not be valid UTF-8
    write_atomically(file, content, follow_links=not own)
    figures = {"file": str(file), "bytes": len(content), "seconds": time.perf_counter() - started}
    for run, name in zip(runs, plain_names([run.name for run in runs]), strict=True):
        results: dict[str, Any] = {"finished": run.summary is not None}
        results |= {metric.json_name: measured.value for metric, measured in run.measured.items()}
        results |= run.sample.as_dict() if run.sample is not None else {}
        figures |= {key if len(runs) == 1 else f"{name}_{key}": value for key, value in results.items()}
    return runs, figures


def collect_run(path: Path, name: str, device: torch.device, data: ImageData | None = None) -> RunContents:
    """Everything the page shows of a run; `missing` says what could not be made and why."""
    run = read_run(path, name)
    try:
        data = data if data is not None else _reopen_data(run.settings)
    except JclError as error:
        return replace(run, missing=(f"No neighbors, map and views: the images cannot be opened. {error}",))
    views = sample = None
    missing = []
    try:
        views = example_views(run.settings, data)
    except (JclError, OSError) as error:
        missing.append(f"No training views: {error}")
    try:
        sample = evaluate_sample(path, run.settings, data, device)
    except (JclError, OSError) as error:
        missing.append(f"No evaluation on a sample: {error}")
    return replace(run, data_remarks=tuple(data_warnings(data)), views=views, sample=sample, missing=tuple(missing))


def read_run(path: Path, name: str) -> RunContents:
    """What the files of a run folder say; missing or damaged ones leave gaps."""
    folder = RunFolder(path)
    settings = folder.settings()
    metrics = read_metrics(folder.metrics_file) if folder.metrics_file.exists() else []
    return RunContents(
        name=name,
        path=expand_user(path).resolve(),
        settings=settings,
        metrics=metrics,
        summary=_read_json(path / "summary.json"),
        choices=read_choices(folder, settings),
        classes=read_classes(folder),
        skipped=read_skipped(folder.skipped_file, _MAX_SKIPPED),
        measured=_measured(path, metrics, settings),
    )


def _reopen_data(settings: Settings) -> ImageData:
    """The training images, if they are still there; nothing is downloaded."""
    location = settings.data.location
    if location not in KNOWN_SETS and not location_path(location).is_absolute():
        raise DataError(f"{location} is not fetched again.")
    return open_run_data(with_values(settings, {"data.download": False, "data.strict": False}), Console(quiet=True))


def _read_json(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(RunError):
        return read_object(path)
    return None


def _measured(path: Path, metrics: Sequence[Mapping[str, Any]], settings: ResolvedSettings) -> dict[Metric, Estimate]:
    """Results that commands wrote into the folder with --json. They take precedence over summary.json and training."""
    training: dict[str, Any] = {}
    for line in (line for line in metrics if line["kind"] == "knn"):
        first = {} if "start_knn_top1" in line else {"untrained_knn_top1": line.get("knn_top1")}
        training |= line if line["step"] else first
    # The images of the summary are the run's own, even if they have moved since.
    summary = {**(_read_json(path / "summary.json") or {}), "data": settings.data.location}
    files = sorted(file for file in path.glob("*.json") if file.name != "summary.json")
    stored = [values for file in files if (values := _read_json(file)) and not _REPEATS & values.keys()]
    found: dict[Metric, Estimate] = {}
    for values in (training, summary, *stored):
        images = values.get("test_images")
        for name in METRICS:
            if is_number(values.get(name)):
                share = is_number(images) and name.endswith(("top1", "top5")) and name != "chance_top1"
                metric = Metric(name, _protocol(name, values, settings))
                found[metric] = estimate(values[name], images if share else None)
    return found


def _protocol(name: str, values: Mapping[str, Any], settings: ResolvedSettings) -> str:
    """How a metric was measured, if not by the default protocol of the run and on its images."""
    parts = []
    if name.startswith("linear_") and values.get("protocol") == "paper":
        parts.append("the paper's protocol")
    for title, key in (("k", "knn_k"), ("temperature", "knn_temperature")) if "knn_" in name else ():
        if is_number(value := values.get(key)) and value != getattr(settings.record, key):
            parts.append(f"{title} = {value:g}")
    if name.startswith("finetune_"):
        labels = values.get("labels")
        if isinstance(labels, str) and labels != "100%":
            parts.append(f"{labels} of the labels" if labels.endswith("%") else f"{labels} labels")
        if values.get("from_scratch") is True:
            parts.append("from scratch")
    place = values.get("data")
    if isinstance(place, str) and without_secrets(place) != without_secrets(settings.data.location):
        parts.append(f"on {Path(place).name}")
    return ", ".join(parts)
