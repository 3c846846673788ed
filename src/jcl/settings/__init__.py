"""Typed settings of a run, the built-in recipes, and how `auto` is resolved."""
