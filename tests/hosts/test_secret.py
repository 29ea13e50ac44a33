"""The secret of workers: where it is found, who may read it, what proves it."""

import os
import stat

import pytest

from torchtitan_rl.hosts import secret as module
from torchtitan_rl.hosts.secret import SecretError, is_proof, load_secret, new_number, proof

GOOD = "0123456789abcdef"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.delenv(module.VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_secret_is_made_once_and_for_this_user_alone(home):
    made = load_secret()
    assert load_secret() == made
    file = home / ".config" / "torchtitan_rl" / "secret"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["secret"]


def test_the_variable_counts_more_than_the_usual_file_and_a_named_file_more_than_both(
    home, monkeypatch
):
    load_secret()
    monkeypatch.setenv(module.VARIABLE, GOOD)
    assert load_secret() == GOOD
    own = home / "own"
    own.write_text(f"{GOOD[::-1]}\n")
    own.chmod(0o600)
    assert load_secret(own) == GOOD[::-1]


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("short", 0o600, "has 5 characters; at least 16"),
        (GOOD, 0o640, "other users can read the secret"),
        (None, 0, "cannot be read"),
    ],
)
def test_a_bad_secret_is_refused_with_what_to_do(home, text, mode, said):
    file = home / "secret"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    with pytest.raises(SecretError, match=said):
        load_secret(file)


def test_a_secret_that_cannot_be_kept_is_not_made(home, monkeypatch):
    monkeypatch.setattr(module, "USUAL_FILE", home / "file" / "secret")
    (home / "file").write_text("")
    with pytest.raises(SecretError, match=f"set {module.VARIABLE}"):
        load_secret()
    assert os.listdir(home) == ["file"]


def test_a_proof_is_of_one_secret_one_end_and_these_numbers():
    a, b = new_number(), new_number()
    right = proof(GOOD, "worker", a, b)
    assert is_proof(right, GOOD, "worker", a, b)
    assert not is_proof(right, GOOD[::-1], "worker", a, b)
    assert not is_proof(right, GOOD, "controller", a, b)
    assert not is_proof(right, GOOD, "worker", b, a)
    assert not is_proof(None, GOOD, "worker", a, b)
