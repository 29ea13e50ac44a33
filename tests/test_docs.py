"""The pages of docs/: built as `make docs` does, with warnings as errors, and true to the code."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bs4 import BeautifulSoup

from tests.pages import PAGES, ROOT
from torchtitan_rl.config import RunConfig
from torchtitan_rl.platform.switches import NAMES
from torchtitan_rl.recipes import registry as recipes

sys.path.append(str(ROOT / "docs" / "_ext"))
import config_fields
import generated

RECIPES = recipes.built_in_recipes()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built pages; the command is that of the Makefile."""
    folder = tmp_path_factory.mktemp("docs")
    made = (ROOT / "Makefile").read_text()
    [options] = re.findall(r"-m sphinx (.*) docs outputs/docs$", made, re.MULTILINE)
    build = [sys.executable, "-m", "sphinx", *options.split(), "-d", str(folder / "trees")]
    run = subprocess.run(
        [*build, "docs", str(folder / "html")], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def described(built: Path) -> dict[str, str]:
    """What the configuration page says of each setting, and of each section."""
    page = BeautifulSoup((built / "configuration.html").read_text(), "html.parser")
    said = [(row.select("td")[0], row.select("td")[-1]) for row in page.select("tbody tr")]
    said += [(heading, heading.find_next("p")) for heading in page.select("h2 > code, h3 > code")]
    found: dict[str, str] = {}
    for name, text in said:
        assert text is not None
        found[name.text] = f"{found.get(name.text, '')} {' '.join(text.text.split())}"
    return found


def test_what_pages_have_from_the_code_is_what_the_code_says():
    """Settings, recipes and packages are committed, to be read where nothing is built."""
    filled = [page for page in PAGES if generated.PART.search(PAGES[page])]
    pages = ("concepts", "configuration", "quickstart", "recipes")
    assert filled == [f"docs/{page}.md" for page in pages]
    for page in filled:
        assert generated.filled(PAGES[page]) == PAGES[page], f"{page} is old: run make format"


def test_generated_parts_are_plain_markdown():
    """What only Sphinx would understand stays out: targets, directives, definition lists."""
    only_sphinx = re.compile(r"^(\(.*\)=|:::.*|: .*|```\{.*)$|\{#", re.MULTILINE)
    for page in ("docs/configuration.md", "docs/recipes.md"):
        assert not only_sphinx.search(PAGES[page]), page
    for row in re.findall(r"^\| `.*$", PAGES["docs/configuration.md"], re.MULTILINE):
        assert len(re.findall(r"(?<!\\)\|", row)) == 6, row  # five cells


def test_every_page_is_built_and_can_be_found_from_the_first(built):
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    index = BeautifulSoup((built / "index.html").read_text(), "html.parser")
    linked = {str(link["href"]).partition(".html")[0] for link in index.select(".sidebar-tree a")}
    assert pages - {"index"} <= linked
    assert all((built / f"{page}.html").is_file() for page in pages)


def test_pages_need_no_network_and_no_script_for_formulas(built):
    for path in built.glob("*.html"):
        page = BeautifulSoup(path.read_text(), "html.parser")
        wanted = [tag.get("src") or tag.get("href") for tag in page.select("script, link, img")]
        bad = ("http", "//")
        assert not [a for a in wanted if str(a).startswith(bad) or "mathjax" in str(a).lower()]
    assert (built / "algorithms.html").read_text().count("<math") > 40


def test_every_setting_is_described_with_its_docstring(described):
    """Settings of the run and of its sections; a field without a docstring fails earlier."""
    for field in config_fields.walk(RunConfig):
        assert field.doc.replace("`", "") in described[field.name], field.name


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_setting_of_a_recipe_is_described(recipe, described):
    """Settings as a run writes them to its config.json: tasks and optional parts too."""
    names = set(flat(RECIPES[recipe]().to_dict()))
    assert {re.sub(r"^task\.tasks\.\d+", "task", name) for name in names} - set(described) == set()


def flat(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {str(number): one for number, one in enumerate(value)}
    if isinstance(value, dict) and value and not name.endswith("kwargs"):
        for key, one in value.items():
            yield from flat(one, f"{name}.{key}" if name else key)
    else:
        yield name


def test_every_recipe_is_on_its_page(built):
    page = BeautifulSoup((built / "recipes.html").read_text(), "html.parser")
    text = " ".join(page.text.split())
    for name, recipe in RECIPES.items():
        assert page.select_one(f"section[id='{name.replace('_', '-')}'], section#{name}"), name
        assert recipes.first_line(recipe) in text


def test_settings_that_pages_name_exist(described):
    sections = {name.partition(".")[0] for name in described if "." in name}
    name = re.compile(rf"`(?:--)?((?:{'|'.join(sections)})(?:\.[a-z_]+)+)(?![\w/(*])")
    for page, text in PAGES.items():
        named = {re.sub(r"\.(py|json|log)$", "", found) for found in name.findall(text)}
        named = {found.replace(".no_", ".") for found in named}
        assert named - set(described) == set(), page


def test_the_optimizations_that_can_be_switched_off_are_those_of_the_code():
    """Settings of a worker's environment, in capitals, are asked for by no name."""
    sources = [path.read_text() for path in (ROOT / "torchtitan_rl").rglob("*.py")]
    asked = re.compile(r'\b(?:enabled|is_active)\("(\w+)"\)')
    used = {name for text in sources for name in asked.findall(text)}
    assert used == {name for name in NAMES if not name.isupper()}
    assert [name for name in NAMES if f"`{name}`" not in PAGES["docs/performance.md"]] == []


def test_a_field_without_a_docstring_is_refused():
    @dataclass
    class Config:
        told: int = 0
        """What it is."""
        untold: int = 0

    with pytest.raises(config_fields.UndocumentedError, match=r"x\.untold has no docstring"):
        config_fields.config_fields(Config, "x.")


def test_messages_that_troubleshooting_quotes_are_in_the_code():
    said = [
        re.sub(r"\s+", " ", "…".join(literal(node)))
        for path in (ROOT / "torchtitan_rl").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant | ast.JoinedStr)
    ]
    page = PAGES["docs/troubleshooting.md"]
    quoted = re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(quoted) > 20
    for message in quoted:
        pieces = [piece.strip(" .:;\n") for piece in message.split("…")]
        # One message of the code has them all, in this order: pieces of several prove nothing.
        whole = re.compile(".*?".join(map(re.escape, filter(None, pieces))))
        assert any(map(whole.search, said)), message


def literal(node: ast.Constant | ast.JoinedStr) -> list[str]:
    """A string, or the fixed parts of an f-string."""
    values = node.values if isinstance(node, ast.JoinedStr) else [node]
    return [str(v.value) if isinstance(v, ast.Constant) else "" for v in values]
