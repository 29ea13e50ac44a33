"""Formulas as MathML, which browsers show by themselves: no script, no font, no network."""

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def inline(self: HTML5Translator, node: nodes.math) -> None:
    self.body.append(converted(node, as_block=False))
    raise nodes.SkipNode


def block(self: HTML5Translator, node: nodes.math_block) -> None:
    self.body.append(f'<div class="math">{converted(node, as_block=True)}</div>\n')
    raise nodes.SkipNode


def converted(node: nodes.Element, *, as_block: bool) -> str:
    try:
        return tex2mathml(node.astext(), as_block=as_block)
    except MathError as error:
        logger.warning("cannot show the formula %r: %s", node.astext(), error, location=node)
        return ""
