"""Names that stand for functions: built-ins, import paths, and every way to get them wrong."""

import math

import pytest

from torchtitan_rl.core.plugins import nearest, resolve

BUILTINS = {"grpo": max, "rloo": min}


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """A folder on the import path; returns a function that writes a module of a fresh name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, source):
        (tmp_path / f"{name}.py").write_text(source)

    return write


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("grop", ["grpo", "rloo"], "did you mean 'grpo'? Known: grpo, rloo"),
        ("xyz", ["grpo", "rloo"], "Known: grpo, rloo"),
        ("gpro", ["gspo", "grpo"], "did you mean 'grpo'? Known: grpo, gspo"),
        ("xyz", ["b", "a", "c"], "Known: a, b, c"),
        ("xyz", [], "Known: none"),
    ],
)
def test_nearest(name, known, hint):
    assert nearest(name, known) == hint
    assert nearest(name, iter(known)) == hint


@pytest.mark.parametrize(
    ("name", "function"),
    [("grpo", max), ("rloo", min), ("math:sqrt", math.sqrt), ("os.path:basename", None)],
)
def test_a_name_or_an_import_path_gives_the_function(name, function):
    found = resolve(name, BUILTINS, what="advantage")
    assert callable(found)
    assert function is None or found is function


def test_only_a_modules_own_functions_are_offered(plugins):
    plugins("plugin_two", "from math import sqrt\ndef double(x): return 2 * x")
    with pytest.raises(ValueError, match=r"no function 'doubl'.*Known: double$"):
        resolve("plugin_two:doubl", BUILTINS, what="advantage")


def test_a_function_in_a_file_of_the_users_own(plugins):
    plugins("plugin_good", "def double(x): return 2 * x")
    assert resolve("plugin_good:double", BUILTINS, what="advantage")(4) == 8


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("grop", "unknown advantage 'grop'; did you mean 'grpo'.*`package.module:function`"),
        ("math.sqrt", "unknown advantage 'math.sqrt'.*`package.module:function`"),
        ("", "unknown advantage ''"),
        ("no_such_module:f", "advantage 'no_such_module:f': cannot import 'no_such_module'"),
        ("math.nothing:f", "advantage 'math.nothing:f': cannot import 'math.nothing'"),
        ("math:sqr", "advantage 'math:sqr': 'math' has no function 'sqr'; did you mean 'sqrt'"),
        ("math:pi", "'math' has no function 'pi'"),
        ("math:", "'math' has no function ''"),
        (":f", "advantage ':f'"),
        (".relative:f", "advantage '.relative:f'"),
    ],
)
def test_a_wrong_name_says_what_is_wrong_with_it(name, message):
    with pytest.raises(ValueError, match=message):
        resolve(name, BUILTINS, what="advantage")


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("plugin_missing_import", "import no_such_module", "no_such_module"),
        ("plugin_raises", "1 / 0", "division by zero"),
        ("plugin_syntax", "def f(:", "syntax"),
    ],
)
def test_a_module_that_does_not_import_is_named_with_its_error(plugins, module, source, message):
    plugins(module, source)
    with pytest.raises(ValueError, match=f"loss '{module}:f': cannot import '{module}'.*{message}"):
        resolve(f"{module}:f", BUILTINS, what="loss")
