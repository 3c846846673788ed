"""Commands that pre-train a backbone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jcl.cli.app import TRAIN, err, out, rank
from jcl.cli.options import command
from jcl.cli.printing import echo, text_table
from jcl.console import format_bytes, format_duration, shell_quote

if TYPE_CHECKING:
    from rich.table import Table

    from jcl.commands.run import Run
    from jcl.settings.commands import DemoOptions, PretrainOptions, ResumeOptions
    from jcl.train.profile import StepProfile


@command("pretrain", "commands.PretrainOptions", group=TRAIN)
def pretrain(options: PretrainOptions) -> dict[str, Any]:
    """Pre-train a backbone on images without labels.

    [dim]jcl pretrain photos/ --out runs/photos[/]
    """
    settings = options.settings()
    from jcl.commands.pretrain import pretrain as run_pretraining
    from jcl.commands.pretrain import profile

    if options.profile:
        return _print_profile(profile(settings, console=err))
    return _report_run(run_pretraining(settings, options.out, resume=options.resume, console=err))


@command("resume", "commands.ResumeOptions", group=TRAIN)
def resume(options: ResumeOptions) -> dict[str, Any]:
    """Continue a stopped run exactly where it was."""
    from jcl.commands.pretrain import resume as resume_pretraining

    return _report_run(resume_pretraining(options.run, console=err, device=options.device))


@command("demo", "commands.DemoOptions", group=TRAIN)
def demo(options: DemoOptions) -> dict[str, Any]:
    """See it work in two minutes on a CPU: MoCo v2 and JCL on synthetic images."""
    from jcl.commands.demo import run_demo

    return run_demo(options.out, options.seed, out, err)


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
    look = f"see {page}" if page.exists() else f"make a page of it with `jcl report {shell_quote(run.path)}`"
    echo(f"Everything is in {run.path} ({look}).")
    return run.summary


_percent, _whole = "{:.1f} %".format, "{:,}".format
# Rows by name in summary.json.
_ROWS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "knn_top1": ("kNN top-1", _percent),
    "knn_top5": ("kNN top-5", _percent),
    "untrained_knn_top1": ("kNN top-1 of the untrained network", _percent),
    "start_knn_top1": ("kNN top-1 of the weights at the start", _percent),
    "chance_top1": ("chance", _percent),
    "rankme": ("RankMe", "{:.1f}".format),
    "contrastive_accuracy": ("contrastive accuracy", _percent),
    "loss": ("loss", "{:.3f}".format),
    "epochs": ("epochs", _whole),
    "steps": ("steps", _whole),
    "skipped_steps": ("steps skipped (loss not finite)", _whole),
    "seconds": ("training time", format_duration),
    "images_per_second": ("images per second", "{:,.1f}".format),
    "peak_memory_bytes": ("peak memory", format_bytes),
    "ranks": ("ranks", _whole),
    "seed": ("seed", str),  # without commas
}


def run_table(summary: Mapping[str, Any]) -> Table:
    """The results that a run has: accuracies first, then costs."""
    rows = []
    always_100 = "knn_top5" if summary.get("classes", 6) <= 5 else ""
    for name, (words, write) in _ROWS.items():
        if name != always_100 and summary.get(name) is not None and (name, summary[name]) != ("ranks", 1):
            rows.append((words, write(summary[name])))
            if (low := summary.get(f"{name}_interval_low")) is not None:
                rows.append(("95 % interval", f"{low:.1f} to {summary[f'{name}_interval_high']:.1f} %"))
    title = f"{summary['method']} on {Path(summary['data']).name}"
    return text_table(["figure", "value"], rows, title=title, right=True)
