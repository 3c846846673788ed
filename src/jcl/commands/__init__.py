"""What each command does, put together from the layers above; `cli/` only parses options and prints."""
