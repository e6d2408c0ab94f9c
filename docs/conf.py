"""Sphinx's configuration: `make docs` builds the pages with warnings as errors."""

project = "resilient_jax"
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "sphinx_book_theme"
html_title = "resilient_jax"
myst_heading_anchors = 3
