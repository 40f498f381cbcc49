"""Sphinx: `sphinx-build -W docs docs/_build`."""

from __future__ import annotations

from importlib.metadata import version as version_of

project = "rescale_data"
copyright = "the developers of rescale_data"
version = release = version_of("rescale_data")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "pictures"]
html_theme = "furo"
html_title = "rescale_data"
html_theme_options = {"light_css_variables": {"color-brand-primary": "#2f5d8a", "color-brand-content": "#2f5d8a"}}

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_typehints = "none"  # the signature has them
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
