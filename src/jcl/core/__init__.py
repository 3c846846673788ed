"""The paper in pure torch: losses, queue, encoders, ShuffleBN and Algorithm 1. Nothing here reads or writes files."""

MAX_CHANNELS = 16  # of images
