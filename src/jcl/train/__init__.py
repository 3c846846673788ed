"""The training loop, the pre-training task, schedules and the progress display."""
