"""Settings of Sphinx for the documentation."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

from docutils import nodes
from docutils.utils.math import latex2mathml

from hetero import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "hetero"
author = "The hetero authors"
project_copyright = "The hetero authors, Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"hetero {__version__}"
html_static_path: list[str] = []
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False

napoleon_google_docstring = False
napoleon_use_ivar = True
autodoc_typehints = "none"
autodoc_class_signature = "mixed"
autodoc_default_options = {"exclude-members": "__init__, __new__"}
default_role = "code"
nitpicky = False
# Some names stand in more than one module.
suppress_warnings = ["ref.python"]

html_math_renderer = "mathml"


def setup(app: Sphinx) -> None:
    """Formulas as MathML, which needs no script from a network, and lists of names as such."""
    inline, display = (partial(_formula, as_block=block) for block in (False, True))
    app.add_html_math_renderer("mathml", (inline, None), (display, None))
    # After napoleon, which stands at 500.
    app.connect("autodoc-process-docstring", _together, priority=600)


def _together(
    app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]
) -> None:
    """Names that share a description: Sphinx would take the first for the type of the last."""
    for k, line in enumerate(lines):
        if match := re.match(r":(ivar|param) (\w+(?:, \w+)+):", line):
            lines[k] = f":{match[1]} {match[2].replace(', ', ',')}:{line[match.end() :]}"


def _formula(writer: Any, node: Any, *, as_block: bool) -> None:
    """A formula without the sizes of brackets, which MathML finds by itself."""
    plain = re.sub(r"\\[Bb]igg?[lr]?(?![a-zA-Z])", "", node.astext())
    writer.body.append(latex2mathml.tex2mathml(plain, as_block=as_block))
    raise nodes.SkipNode
