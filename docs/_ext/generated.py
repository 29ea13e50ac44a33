"""Puts what is generated from the code into the pages that ask for it.

A page asks with a line `<!-- generated: configuration -->` (or `layers`, `recipes`).
"""

import re
from collections.abc import Callable

from config_fields import UndocumentedError
from config_page import configuration
from layers_page import layers
from recipes_page import recipes
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)

GENERATORS: dict[str, Callable[[], str]] = {
    "configuration": configuration,
    "layers": layers,
    "recipes": recipes,
}
MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def fill(app: Sphinx, name: str, source: list[str]) -> None:
    def generated(marker: re.Match[str]) -> str:
        app.env.note_reread()  # the code may change while the page does not
        try:
            return GENERATORS[marker[1]]()
        except UndocumentedError as error:
            logger.warning("%s", error, location=name)
            return ""

    source[0] = MARKER.sub(generated, source[0])
