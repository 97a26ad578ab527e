"""Of the documentation, which `make docs` builds into build/docs."""

import sys
from pathlib import Path

from jax_bwgemm import __version__

sys.path.insert(0, str(Path(__file__).parent))  # for `catalogue`

project = "jax_bwgemm"
author = "the jax_bwgemm authors"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "catalogue"]
html_theme = "furo"
html_title = f"jax_bwgemm {version}"
html_show_copyright = html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["static"]
html_css_files = ["pages.css"]
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
nitpicky = True
nitpick_ignore_regex = [("py:class", r"(collections\.abc|jax)\..*")]  # of others, whose pages are not asked for here
default_role = "literal"  # what docstrings have between backticks is code
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings say shapes and dtypes
autodoc_preserve_defaults = True
napoleon_use_rtype = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88
