"""Settings of a run, recipes, automatic values, and the options of the commands."""
