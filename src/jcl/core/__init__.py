"""The paper in pure torch: losses, queue, encoders, ShuffleBN and Algorithm 1. Nothing here reads or writes files."""
