"""Writes what is made from the code into the pages of docs/: settings, recipes, packages.

python docs/_ext/generated.py    # `make docs` and `make format` do it, too

A page has it between `<!-- generated: configuration -->` (or `layers`, `recipes`, `resume`) and
`<!-- end of generated -->`. It is committed, so that a page can be read where nothing is built; a
test says when it is old.
"""

import re
from collections.abc import Callable
from pathlib import Path

from config_page import configuration
from layers_page import layers
from recipes_page import recipes
from resume_page import resume

DOCS = Path(__file__).parents[1]
GENERATORS: dict[str, Callable[[], str]] = {
    "configuration": configuration,
    "layers": layers,
    "recipes": recipes,
    "resume": resume,
}
PART = re.compile(
    r"^<!-- generated: (\w+) -->$.*?^<!-- end of generated -->$", re.MULTILINE | re.DOTALL
)


def filled(page: str) -> str:
    """The page with its generated parts as the code has them now."""

    def part(found: re.Match[str]) -> str:
        made = GENERATORS[found[1]]().strip()
        return f"<!-- generated: {found[1]} -->\n\n{made}\n\n<!-- end of generated -->"

    return PART.sub(part, page)


def main() -> None:
    for path in sorted(DOCS.glob("*.md")):
        page = path.read_text()
        if (new := filled(page)) != page:
            path.write_text(new)
            print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
