"""Losses, queue, encoders, ShuffleBN and Algorithm 1, with Triton kernels. Nothing here reads or writes files."""

MAX_CHANNELS = 16  # of images
