"""Sphinx configuration."""

from modelopt_spec.versions import __version__

project = "modelopt-spec"
author = "The modelopt-spec authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "results/**/README.md"]
html_theme = "furo"
html_title = "modelopt-spec"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
suppress_warnings = ["myst.xref_missing", "ref.python"]
