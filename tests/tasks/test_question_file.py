"""Files of questions: what is read, and how every bad line is named, many at a time."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.tasks.question_file import (
    Question,
    QuestionFileError,
    check_text,
    read_questions,
)

GOOD = b'{"question": "2 + 3?", "answer": "5"}'


@pytest.fixture
def read(tmp_path):
    """What is read from a file with this content."""

    def read(content, **settings):
        path = tmp_path / "sums.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else b"\n".join(content))
        fields = {"question_field": "question", "answer_field": "answer"}
        return read_questions(path, **fields | {"check_answer": check_text} | settings)

    return read


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (GOOD, [1]),
        (GOOD + b"\n", [1]),
        (GOOD + b"\r\n" + GOOD + b"\r\n", [1, 2]),
        (b"\n\n" + GOOD + b"\n  \n" + GOOD + b"\n\n", [3, 5]),
        (b"\xef\xbb\xbf" + GOOD, [1]),
        (b"  " + GOOD + b"  ", [1]),
    ],
)
def test_questions_keep_the_number_of_their_line(read, content, lines):
    assert read(content) == [Question("2 + 3?", "5", line) for line in lines]


@pytest.mark.parametrize("answer", ["5", 5, 5.5, -3, 10**30, " 5 ", "五"])
def test_answers_are_text_or_numbers(read, answer):
    [question] = read([json.dumps({"question": "?", "answer": answer}).encode()])
    assert question.answer == answer


def test_fields_can_have_other_names(read):
    line = b'{"prompt": "2 + 3?", "target": 5, "question": null}'
    settings = {"question_field": "prompt", "answer_field": "target"}
    assert read([line], **settings) == [Question("2 + 3?", 5, 1)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"not json", "it is not JSON: JSON is malformed"),
        (b'{"question": "a", "answer": "b"', "it is not JSON: Input data was truncated"),
        (GOOD + GOOD, "it is not JSON"),
        (b'{"question": "a", "answer": NaN}', "it is not JSON"),
        (b'{"question": "a", "answer": 1e999}', "it is not JSON: Number out of range"),
        (b'{"question": "\\ud800", "answer": "b"}', "it is not JSON"),
        (b'{"question": "\xff", "answer": "b"}', "it is not UTF-8"),
        (GOOD.decode().encode("utf-16"), "it is not"),
        (b'{"question": "a", "answer": ' + b"[" * 9999, "it is nested too deeply"),
        (b"[", "one JSON object on every line is needed, not one over many"),
        (b"{", "one JSON object on every line is needed, not one over many"),
        (b"[1, 2]", "it is a list; expected an object"),
        (b'"text"', "it is text; expected an object"),
        (b"5", "it is a number; expected an object"),
        (b"null", "it is null; expected an object"),
        (b"{}", "it has no field 'question'; Known: none (task.question_field)"),
        (
            b'{"quesiton": "a", "answer": "b"}',
            "no field 'question'; did you mean 'quesiton'? Known: answer, quesiton",
        ),
        (b'{"question": "a", "reply": "b"}', "no field 'answer'; Known: question, reply"),
        (b'{"question": null, "answer": "b"}', "its field 'question' is null"),
        (b'{"question": 5, "answer": "b"}', "the question is a number; expected text"),
        (b'{"question": ["a"], "answer": "b"}', "the question is a list; expected text"),
        (b'{"question": "", "answer": "b"}', "the question is empty"),
        (b'{"question": " \\n", "answer": "b"}', "the question is empty"),
        (b'{"question": "a", "answer": null}', "its field 'answer' is null"),
        (b'{"question": "a", "answer": ""}', "the answer is empty"),
        (b'{"question": "a", "answer": " "}', "the answer is empty"),
        (b'{"question": "a", "answer": true}', "the answer is a boolean; expected text or a n"),
        (b'{"question": "a", "answer": {}}', "the answer is an object; expected text or a n"),
        (b'{"question": "a", "answer": ["b"]}', "the answer is a list; expected text or a n"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_bad_line_is_named_with_its_number(read, tmp_path, line, said):
    with pytest.raises(QuestionFileError) as error:
        read([GOOD, b"", line, GOOD])
    assert f"{tmp_path}/sums.jsonl has 1 bad line of 3:\n  line 3: " in str(error.value)
    assert said in str(error.value)


def test_bad_lines_are_named_together_and_the_rest_counted(read):
    with pytest.raises(QuestionFileError) as error:
        read([GOOD, b"x", GOOD, *[b"{}"] * 30])
    first, *lines, last = str(error.value).splitlines()
    assert first.endswith("has 31 bad lines of 33:")
    assert [line.split(":")[0] for line in lines] == [f"  line {n}" for n in (2, *range(4, 13))]
    assert last == "  and 21 more"


@pytest.mark.parametrize("content", [b"", b"\n", b"\xef\xbb\xbf\n  \n"])
def test_an_empty_file_is_an_error(read, content):
    with pytest.raises(QuestionFileError, match=r"sums\.jsonl is empty: it needs a JSON object"):
        read(content)


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere.jsonl", "there is no file .*nowhere.jsonl"), ("", "is a folder: give a file")],
)
def test_a_file_that_cannot_be_opened_is_named(tmp_path, name, message):
    with pytest.raises(QuestionFileError, match=message):
        read_questions(
            tmp_path / name, question_field="q", answer_field="a", check_answer=check_text
        )


TEXT = st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip)


@given(st.lists(st.tuples(TEXT, TEXT | st.integers(-(2**70), 2**70)), min_size=1))
def test_what_json_writes_is_read(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("files") / "any.jsonl"
    written = [json.dumps({"q": q, "a": a}, ensure_ascii=False) for q, a in lines]
    path.write_text("\n".join(written), encoding="utf-8")
    questions = read_questions(path, question_field="q", answer_field="a", check_answer=check_text)
    assert [(q.text, q.answer) for q in questions] == lines
    assert [q.line for q in questions] == list(range(1, len(lines) + 1))
