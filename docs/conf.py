"""Sphinx's configuration: `make docs` builds the pages with warnings as errors."""

from typing import Any

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


def keep_colon(
    _app: object, what: str, _name: str, _value: object, _options: object, lines: list[str]
) -> None:
    """Replace the colon of a field's first line: napoleon would take what is before it for the field's type."""
    if what in ("attribute", "property", "data") and lines:
        lines[0] = lines[0].replace(": ", " \N{EN DASH} ")


def setup(app: Any) -> None:  # noqa: ANN401 - sphinx.application.Sphinx, which only `make docs` installs
    """Connect `keep_colon` before napoleon, whose priority is 500."""
    app.connect("autodoc-process-docstring", keep_colon, priority=400)
