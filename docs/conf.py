"""Sphinx: `sphinx-build -W docs docs/_build`."""

from __future__ import annotations

from importlib.metadata import version as version_of
from typing import Any

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

autodoc_mock_imports = ["lightning", "transformers", "torchtitan", "tyro"]  # the documentation is built without them
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
default_role = "code"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True

PAGES = {  # files of the repository that are pages of their own here
    "../README.md": "index.md",
    "../CHANGELOG.md": "changelog.md",
    "docs/compatibility.md": "compatibility.md",
    "../benchmarks/README.md": "benchmarks.md",
    "../benchmarks/RESULTS.md": "results.md",
    "RESULTS.md": "results.md",
    "../rescale_data/README.md": "rooms.md",
    "../rescale_data/checkpoint/README.md": "checkpoints.md",
    "../rescale_data/xla/README.md": "torch_xla.md",
    "../xla/README.md": "torch_xla.md",
    "../examples/README.md": "examples.md",
}


def _pages(source: list[str]) -> None:
    for path, page in PAGES.items():
        source[0] = source[0].replace(f"]({path})", f"]({page})")


def setup(app: Any) -> None:
    app.connect("source-read", lambda app, name, source: _pages(source))
    app.connect("include-read", lambda app, path, parent, source: _pages(source))
