"""Commands that pre-train a backbone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jcl.cli.options import TRAIN, command
from jcl.cli.printing import echo, out, progress_bar, rank, text_table
from jcl.console import format_bytes, format_duration, shell_quote

if TYPE_CHECKING:
    from rich.table import Table

    from jcl.commands.run import Run
    from jcl.settings import commands
    from jcl.train.profile import StepProfile


@command("pretrain", group=TRAIN)
def pretrain(options: commands.PretrainOptions) -> dict[str, Any]:
    """Pre-train a backbone on images without labels.

    [dim]jcl pretrain photos/ --out runs/photos[/]
    """
    if options.profile:
        options.refuse(("devices", "out", "resume"), "does not go with --profile, which times steps on one device")
    settings = options.settings()
    from jcl.commands.pretrain import pretrain as run_pretraining
    from jcl.commands.pretrain import profile

    if options.profile:
        with progress_bar("steps") as progress:
            found = profile(settings, progress=progress)
        return _print_profile(found)
    return _report_run(run_pretraining(settings, options.out, resume=options.resume))


@command("resume", group=TRAIN)
def resume(options: commands.ResumeOptions) -> dict[str, Any]:
    """Continue a stopped run exactly where it stopped."""
    from jcl.commands.pretrain import resume as resume_pretraining

    return _report_run(resume_pretraining(options.run, device=options.device))


@command("demo", group=TRAIN)
def demo(options: commands.DemoOptions) -> dict[str, Any]:
    """Pre-train MoCo v2 and JCL on synthetic images, in two minutes on a CPU."""
    from jcl.commands.demo import run_demo

    found, rows = run_demo(options.out, options.seed), []
    for name, accuracy in found.accuracies.items():
        cost = found.runs[name].summary if name in found.runs else {}
        spent = [f"{cost['seconds']:.1f}", format_bytes(cost["peak_memory_bytes"])] if cost else ["", ""]
        rows.append([name, f"{accuracy:.1f} %", *spent])
    titles = ["features", "kNN top-1", "seconds", "peak memory"]
    out.print(text_table(titles, rows, title="kNN accuracy of the features", right=True))
    done = f"Done in {format_duration(found.seconds)}. Open {found.page} in a browser"
    echo(f"{done}; then try your own images: `jcl pretrain FOLDER`.")
    names = ("pixels_knn_top1", "random_knn_top1", "moco_v2_knn_top1", "jcl_knn_top1")
    return dict(zip(names, found.accuracies.values(), strict=True)) | {"seconds": found.seconds}


def _print_profile(profile: StepProfile) -> dict[str, Any]:
    parts = [*profile.parts.items(), ("the rest", profile.rest), ("whole step", profile.step)]
    rows = [(name, f"{taken:.2f}", f"{taken / profile.step:.0%}") for name, taken in parts]
    out.print(text_table(["part of a step", "ms", "share"], rows, title=f"{profile.images_per_second:,.0f} images/s"))
    figures = {f"{name.replace(' ', '_')}_ms": taken for name, taken in profile.parts.items()}
    return figures | {"step_ms": profile.step, "images_per_second": profile.images_per_second}


def _report_run(run: Run) -> dict[str, Any]:
    if rank > 0:
        return {}  # only the first rank is sure to see the folder
    out.print(run_table(run.summary))
    page = run.path / "report.html"
    look = f"see {page}" if page.exists() else f"write a report with `jcl report {shell_quote(run.path)}`"
    echo(f"Everything is in {run.path} ({look}).")
    return run.summary


def run_table(summary: Mapping[str, Any]) -> Table:
    """The results that a run has: accuracies first, then costs."""
    from jcl.report.contents import QUALITY
    from jcl.report.tables import METRICS, RESOURCES, percent

    known: dict[str, tuple[str, Callable[[Any], str]]] = {
        **{name: (title.replace(",", ""), percent) for name, title in METRICS.items()},
        "rankme": (QUALITY["rankme"][0], "{:.1f}".format),
        "contrastive_accuracy": ("contrastive accuracy", percent),
        "loss": ("loss", "{:.3f}".format),
        **{name: (name, "{:,}".format) for name in ("epochs", "steps")},
        "skipped_steps": ("steps skipped (loss not finite)", "{:,}".format),
        **{name: (title, write) for title, (name, write) in RESOURCES.items()},
        "ranks": ("ranks", str),
        "seed": ("seed", str),
    }
    rows = []
    for name, (words, write) in known.items():
        if summary.get(name) is not None and (name, summary[name]) != ("ranks", 1):
            rows.append((words, write(summary[name])))
            if (low := summary.get(f"{name}_interval_low")) is not None:
                rows.append(("95 % interval", f"{low:.1f} to {summary[f'{name}_interval_high']:.1f} %"))
    title = f"{summary['method']} on {Path(summary['data']).name}"
    return text_table(["metric", "value"], rows, title=title, right=True)
