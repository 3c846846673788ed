"""Ranks, devices and launching: what a run on one or several processes needs."""
