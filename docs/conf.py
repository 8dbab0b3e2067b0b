"""Sphinx configuration. Figures and reference pages are made from the code before the pages are read."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "ext")]

import figures  # noqa: E402
import reference  # noqa: E402

from modelopt_spec.versions import __version__  # noqa: E402

figures.draw_all(HERE / "generated")
reference.write_all(HERE / "generated")

project = "modelopt-spec"
author = "The modelopt-spec authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "generated/*.md"]
html_theme = "furo"
html_title = "modelopt-spec"
html_theme_options = {"source_repository": "", "navigation_with_keys": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
python_use_unqualified_type_names = True
nitpicky = False
suppress_warnings = ["ref.python"]
