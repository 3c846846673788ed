"""`report.html`: what run folders say and what the networks make of their images, put on one page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from jcl.commands.report_features import look_at, shown_image
from jcl.commands.report_run import open_again, read_run
from jcl.console import listed, plain_names
from jcl.data import ImageData
from jcl.data.named import data_warnings
from jcl.distributed.device import choose_device
from jcl.errors import JclError, RunError, SettingsError
from jcl.paths import home_expanded
from jcl.report.contents import ExampleViews, RunContents
from jcl.report.page import lost_parts, render_page
from jcl.report.run_pictures import example_views
from jcl.runs.atomic import write_atomically
from jcl.train.build import run_view_recipe


@dataclass(frozen=True)
class Report:
    """A page that was written, and what it shows."""

    file: Path
    size: int
    runs: Sequence[RunContents]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The figures as one flat object of plain names; those of a run begin with its name where there are several."""
        figures: dict[str, Any] = {"file": str(self.file), "bytes": self.size, "seconds": self.seconds}
        for run, name in zip(self.runs, plain_names([run.name for run in self.runs]), strict=True):
            prefix = "" if len(self.runs) == 1 else f"{name}_"
            figures |= {f"{prefix}{figure}": value for figure, value in _figures(run).items()}
        return figures


def write_report(
    paths: Sequence[Path],
    file: Path,
    *,
    names: Sequence[str] | None = None,
    title: str | None = None,
    note: str = "",
    device: str = "auto",
    force: bool = False,
) -> Report:
    """Write the page of one or several runs to `file`; the images are looked at again where they still are.

    `note` is a sentence to be read with the summary. A page there that shows what can no longer be made, because the
    images have gone, is replaced only by `force`.
    """
    if not paths:
        raise SettingsError("A report of what? Give one or several run folders.")
    if names and len(set(names)) < len(names):
        raise SettingsError("--name calls two runs the same; give each a name of its own.")
    started = time.perf_counter()
    target = choose_device(device)
    runs = [gather(path, name, target) for path, name in zip(paths, names or run_names(paths), strict=True)]
    page = render_page(runs, title, note)
    if not force:
        _refuse_loss(file, page, runs)
    return _write(runs, page, file, started)


def write_run_report(path: Path, data: ImageData, device: torch.device) -> Report:
    """The page of a run that has just ended, beside its files; `data` is open already."""
    started = time.perf_counter()
    runs = [gather(path, path.resolve().name, device, data)]
    return _write(runs, render_page(runs), path / "report.html", started)


def gather(path: Path, name: str, device: torch.device, data: ImageData | None = None) -> RunContents:
    """All that the page shows of a run; parts that cannot be made are left out and it is said why."""
    run = read_run(path, name)
    absent = []
    try:
        data = data if data is not None else open_again(run.settings)
    except JclError as error:
        reason = f"Its images could not be opened again, so neighbours, map and views are missing: {error}"
        return replace(run, absent=(reason,))
    run = replace(run, about_images=tuple(data_warnings(data)))
    try:
        run = replace(run, views=_views(run, data))
    except (JclError, OSError) as error:
        absent.append(f"Views could not be made: {error}")
    try:
        run = replace(run, look=look_at(path, run.settings, data, device))
    except (JclError, OSError) as error:
        absent.append(f"The network could not be shown any images: {error}")
    return replace(run, absent=tuple(absent))


def run_names(paths: Sequence[Path]) -> list[str]:
    """The folders' names, with as many of the folders above as it takes to tell them apart."""
    whole = [home_expanded(path).resolve() for path in paths]
    if len(set(whole)) < len(whole):
        raise SettingsError("A run is named twice; give each run folder once.")
    depth = 1
    while len({path.parts[-depth:] for path in whole}) < len(whole):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in whole]


def _views(run: RunContents, data: ImageData) -> ExampleViews:
    samples, views = example_views(run.settings, data.train, run_view_recipe(run.settings))
    return ExampleViews([shown_image(data.train, sample) for sample in samples.tolist()], views)


def _refuse_loss(file: Path, page: str, runs: Sequence[RunContents]) -> None:
    """Raise if the page in `file` shows what the new one lacks: once replaced, nothing could bring that back."""
    if not file.is_file():
        return
    lost = lost_parts(file.read_text(encoding="utf-8", errors="replace"), page)
    if lost:
        sentences = [
            f"{file} is left as it is, for a page made now would lack its {listed(lost)}.",
            *(reason for run in runs for reason in run.absent),
            "Write the page to another file with -o FILE, or over this one with --force.",
        ]
        raise RunError(" ".join(sentences))


def _write(runs: Sequence[RunContents], page: str, file: Path, started: float) -> Report:
    content = page.encode(errors="replace")  # names of folders may be no UTF-8
    if file.is_dir():
        raise RunError(f"{file} is a folder; give the page a file of its own, such as {file / 'report.html'}.")
    write_atomically(file, content)
    return Report(file, len(content), runs, time.perf_counter() - started)


def _figures(run: RunContents) -> dict[str, Any]:
    figures: dict[str, Any] = {"finished": run.summary is not None}
    figures |= {figure.plain(): value for figure, value in run.measured.items()}
    if run.look is not None:
        figures |= {f"sample_knn_top1_k{result.k}": result.top1 for result in run.look.knn}
        if run.look.probe_top1 is not None:
            figures["sample_linear_top1"] = run.look.probe_top1
        if run.look.spread is not None:
            figures["mean_view_similarity"] = float(run.look.spread.similarity.mean())
            figures["mean_view_variance"] = float(run.look.spread.variance.mean())
    return figures
