"""How Sphinx builds these pages: `make docs`. Everything a page needs is in it; no network."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

project = "torchtitan_rl"
html_title = project
extensions = ["myst_parser", "mathml"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
pygments_style = "default"
templates_path: list[str] = []
exclude_patterns = ["_ext"]
nitpicky = True
smartquotes = False  # or `--steps` becomes a dash and a word
