"""Sphinx configuration; `make docs` builds the site."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import jcl  # noqa: E402

project = "jcl"
author = "the jcl authors"
release = version = jcl.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.mathjax",
]
myst_enable_extensions = ["dollarmath", "deflist", "colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
suppress_warnings = ["myst.header"]
html_theme = "furo"
html_title = "Joint Contrastive Learning"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
default_role = "code"  # `name` in a docstring

RESERVED = {"search", "genindex", "py-modindex"}  # Sphinx writes these pages itself
if clash := RESERVED & {page.stem for page in Path(__file__).parent.glob("*.md")}:
    raise ValueError(f"rename the pages {sorted(clash)}: Sphinx would overwrite them")
