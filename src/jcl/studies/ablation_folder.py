"""The folder of an ablation: what it is about, its cells, and what became of each."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jcl.errors import RunError
from jcl.runs.folder import RunFolder, add_skipped, read_skipped
from jcl.runs.json_object import named_differences, read_object, write_object
from jcl.settings.schema import affects_results, settings_from
from jcl.studies.cells import Cell


class CellFolder:
    """A run folder that also holds `cell.json`, which plans it, and `result.json` or `failure.json`, which end it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan_file = path / "cell.json"
        self.result_file = path / "result.json"
        self.failure_file = path / "failure.json"
        self.log_file = path / "log.txt"
        self.left_out_file = path / "left_out.txt"  # images that could not be read when the features were measured

    def plan(self, cell: Cell) -> None:
        """Write down what is to be done here; a run that has begun keeps to what was planned then.

        Until then a plan made anew may say otherwise in what cells need not share, such as the device.
        """
        if not self.plan_file.exists() or not RunFolder(self.path).holds_run():
            planned = {
                "values": dict(cell.values),
                "seed": cell.seed,
                "settings": cell.settings.model_dump(mode="json"),
            }
            write_object(self.plan_file, planned)

    def cell(self) -> Cell:
        planned = read_object(self.plan_file)
        try:
            values, seed, settings = dict(planned["values"]), int(planned["seed"]), dict(planned["settings"])
        except (KeyError, TypeError, ValueError):
            raise RunError(f"{self.plan_file} does not plan a cell; remove it and give `jcl ablate` again.") from None
        return Cell(values, seed, settings_from(settings, str(self.plan_file)))

    def result(self) -> dict[str, Any] | None:
        """The figures, once all of them are there."""
        return read_object(self.result_file) if self.result_file.exists() else None

    def failure(self) -> str | None:
        """The sentence that the cell ended with, if it did."""
        return str(read_object(self.failure_file).get("error")) if self.failure_file.exists() else None

    def finish(self, figures: Mapping[str, Any]) -> None:
        """Write the figures: the last thing that happens in a cell."""
        write_object(self.result_file, figures)

    def fail(self, sentence: str) -> None:
        """Write down why there will be no figures; where not even that can be written, it is only said."""
        with contextlib.suppress(RunError):
            write_object(self.failure_file, {"error": sentence})

    def leave_out(self, skipped: Mapping[str, str]) -> None:
        """Write down which images the figures do not rest on because they cannot be read, and why."""
        add_skipped(self.left_out_file, skipped, anew=True)

    def left_out(self) -> dict[str, str]:
        return read_skipped(self.left_out_file)

    def forget_failure(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.failure_file.unlink()


@dataclass(frozen=True)
class CellRecord:
    """What is known of a cell: its figures, or the sentence it failed with, or neither yet."""

    cell: Cell
    result: dict[str, Any] | None
    failure: str | None


class AblationFolder:
    """`study.json`, which says what the ablation is about, `cells/`, and what is made of the cells' results."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.study_file = path / "study.json"
        self.cells = path.resolve() / "cells"  # cells may be carried out elsewhere

    def refuse_other(self, study: Mapping[str, Any]) -> None:
        """Raise if the folder holds something else than the beginnings of this study."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is a file; give the ablation a folder of its own with --out.")
        if not self.study_file.exists():
            if self.path.is_dir() and any(entry.name != ".lock" for entry in self.path.iterdir()):
                raise RunError(f"{self.path} is not empty and holds no ablation; choose another folder with --out.")
            return
        begun = read_object(self.study_file)
        if sorted(begun.get("over", [])) != sorted(study["over"]):
            over = " and ".join(map(str, begun.get("over", [])))
            raise RunError(f"{self.path} holds an ablation over {over}; choose another folder with --out.")
        self._refuse_differences(begun, study)

    def _refuse_differences(self, begun: Mapping[str, Any], study: Mapping[str, Any]) -> None:
        settings = {name: value for name, value in begun.get("settings", {}).items() if affects_results(name)}
        before = settings | begun.get("data", {})
        differences = named_differences(before, study["settings"] | study["data"])
        if differences:
            raise RunError(
                f"the ablation in {self.path} was begun with {differences}; "
                "cells that differ in that cannot be compared: give the same, or choose another folder with --out."
            )

    def begin(self, study: Mapping[str, Any], cells: Sequence[Cell]) -> None:
        """Write down the study and its cells, where they are not yet."""
        if not self.study_file.exists():
            write_object(self.study_file, study)
        for cell in cells:
            self.cell(cell).plan(cell)

    def cell(self, cell: Cell) -> CellFolder:
        return CellFolder(self.cells / cell.name)

    def records(self) -> list[CellRecord]:
        """All cells that were ever planned here."""
        folders = [CellFolder(file.parent) for file in sorted(self.cells.glob("*/cell.json"))]
        return [CellRecord(folder.cell(), folder.result(), folder.failure()) for folder in folders]
