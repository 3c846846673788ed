"""Seconds from the start of `jcl pretrain` to the end of its first step, by phase.

    python benchmarks/startup.py cifar.npz --runs 3 --json startup.json

Other options go to `jcl pretrain`. The first run is cold: the compiler's caches are empty. The time of a phase excludes
the phases within it.
"""

import argparse
import importlib.machinery
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

IMPORTS = ("jcl.cli", "torch", "torchvision", "torch._dynamo", "torch._inductor.compile_fx", "jcl.commands.pretrain")
PHASES = {
    "open the data": "jcl.commands.pretrain.open_run_data",
    "sizes of images": "jcl.commands.pretrain.data_facts",
    "build the network": "jcl.commands.train_run.build_learner",
    "survey of headers": "jcl.commands.pretrain.survey_headers",
    "fingerprints": "jcl.commands.train_run.fingerprint",
    "kNN and RankMe of step 0": "jcl.train.pretrain.PretrainTask.between_epochs",
    "start of workers": "jcl.data.workers.DecodingPool._start",
    "wait for decoded images": "jcl.data.workers.DecodingPool._receive",
    "first step": "jcl.train.trainer.Trainer._step",
}


class Timeline:
    """Adds up the seconds of each phase. As a finder in `sys.meta_path` it also times imports."""

    def __init__(self, began: str, result: str) -> None:
        self.seconds, self.result = defaultdict(float, interpreter=time.time() - float(began)), Path(result)
        self._phase, self._since = "other", time.perf_counter()

    def change(self, phase: str) -> str:
        now, before = time.perf_counter(), self._phase
        self.seconds[before] += now - self._since
        self._phase, self._since = phase, now
        return before

    def timed(self, holder: Any, name: str, phase: str) -> None:
        function = getattr(holder, name)

        def call(*arguments: Any, **options: Any) -> Any:
            before = self.change(phase)
            found = function(*arguments, **options)
            if phase == "first step" and (cuda := sys.modules["torch"].cuda).is_initialized():
                cuda.synchronize()
            self.change(before)
            for title, place in PHASES.items() if phase == f"import {IMPORTS[-1]}" else ():
                owner, _, attribute = place.rpartition(".")
                self.timed(pkgutil.resolve_name(owner), attribute, title)
            if phase == "first step" and not self.result.exists():
                self.result.write_text(json.dumps(self.seconds), encoding="utf-8")
                signal.raise_signal(signal.SIGTERM)  # ends the run
            return found

        setattr(holder, name, call)

    def find_spec(self, name: str, path: Any, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in IMPORTS else None
        if spec is not None:
            self.timed(spec.loader, "exec_module", f"import {name}")
        return spec


def measure(arguments: list[str], folder: Path) -> dict[str, float]:
    """The seconds of each phase of one run, which is stopped after its first step."""
    result = folder.with_suffix(".json")
    words = ["--measured", time.time(), result, "pretrain", *arguments, "--out", folder]
    subprocess.run([sys.executable, __file__, *map(str, words)], stdout=subprocess.DEVNULL, check=False)
    if not result.exists():
        sys.exit("Error: the run ended before its first step")
    seconds = json.loads(result.read_text(encoding="utf-8"))
    return {**seconds, "all": sum(seconds.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {name: f"{folder}/{name}" for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        rows = [measure(arguments, Path(folder) / f"run-{run}") for run in range(options.runs)]
    for phase in max(rows, key=len):
        print(f"{phase:34}" + "".join(f"{row.get(phase, 0):8.2f}" for row in rows))
    from machine import save  # imports torch, which the measured process must not do here

    save({"rows": rows}, options.json, "cpu" if "cpu" in arguments else "cuda")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measured"]:
        sys.meta_path.insert(0, Timeline(*sys.argv[2:4]))
        sys.argv[1:4] = []
        importlib.import_module("jcl.__main__").main()
    else:
        main()
