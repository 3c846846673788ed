"""What the commands do: each puts parts of the layers above together. `jcl X` is in the module that is called X."""
