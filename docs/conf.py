"""Sphinx's configuration: `make docs` builds the pages with warnings as errors."""

project = "resilient_jax"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "sphinx_book_theme"
html_title = "resilient_jax"
myst_heading_anchors = 3
default_role = "code"  # docstrings mark code with single backticks, as the pages do
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True  # as in the code, not as Python prints the values
python_maximum_signature_line_length = 80
napoleon_use_ivar = True  # a dataclass's fields are described once, in its "Attributes:"
