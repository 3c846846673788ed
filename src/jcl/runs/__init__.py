"""The files of a run: folder, settings, metrics, checkpoints, locks and atomic writes."""
