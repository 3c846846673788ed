"""WebDataset shards: tar files of images and their labels."""
