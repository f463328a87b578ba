"""Reading YAML as people write it, and what is said when it cannot be read."""

from pathlib import Path
from typing import Any, Literal, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import model_validator

from archspec.errors import ArchspecError
from archspec.schema import Closed, Document, field_error, to_yaml
from tests.archspec.strategies import PRINTABLE


class Inner(Closed):
    size: int = 1
    kind: Literal["small", "large"] = "small"


class Outer(Closed):
    rate: float
    items: tuple[Inner, ...] = ()
    words: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _large_is_first(self) -> Self:
        for i, item in enumerate(self.items[1:], 1):
            if item.kind == "large":
                raise field_error(f"items.{i}.kind", "only {items.0} may be large")
        if self.rate < 0:
            raise ValueError(f"Rate {self.rate} must not be negative")
        return self


def parse(text: str) -> Any:
    return Document.parse(text, "f.yaml").data


def message(text: str) -> str:
    """What ``Outer`` says about a document."""
    with pytest.raises(ArchspecError) as caught:
        Document.parse(text, "f.yaml").validate(Outer)
    return str(caught.value)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-3", 0.001),
        ("1E-3", 0.001),
        ("1.5e3", 1500.0),
        ("60e3", 60_000),
        ("1_000", 1000),
        ("1_000.5", 1000.5),
        ("+3", 3),
        ("-3", -3),
        ("0", 0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-1e-05", -1e-05),
        ("007", 7),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("Off", "Off"),
        ("y", "y"),
        ("none", "none"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("0x1F", "0x1F"),
        (".inf", ".inf"),
        ("3h", "3h"),
        ("e3", "e3"),
        ("'1e-3'", "1e-3"),
    ],
)
def test_plain_scalars(written: str, value: object) -> None:
    read = parse(f"x: {written}")["x"]
    assert read == value
    assert type(read) is type(value)


def test_whole_number_with_exponent_counts_as_one() -> None:
    """A budget of 60e3 tokens is an int, as every field of counts asks for; 60.0 stays a float."""
    assert [type(x) for x in parse("[60e3, 1e2, 60.0]")] == [int, int, float]


def test_json_is_read_too() -> None:
    assert parse('{"a": [1, 2.5e-1, "no", null, true]}') == {"a": [1, 0.25, "no", None, True]}


def test_the_yaml_of_other_libraries_is_left_alone() -> None:
    import yaml

    assert yaml.safe_load("[no, 1e-3]") == [False, "1e-3"]


# What is said about files that cannot be read.


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ArchspecError, match=r"nowhere\.yaml: no such file$"):
        Document.load(tmp_path / "nowhere.yaml")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ArchspecError, match=r"cannot be read: .*directory"):
        Document.load(tmp_path)


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"name: caf\xe9")
    with pytest.raises(ArchspecError, match=r"latin\.yaml: cannot be read: .*utf-8.* can't decode byte 0xe9"):
        Document.load(path)


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n"])
def test_empty_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text(text)
    with pytest.raises(ArchspecError, match=r"empty\.yaml: the file is empty$"):
        Document.load(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: [1, 2", r"f.yaml:2: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("a: 1\n\tb: 2", "f.yaml:2: not valid YAML: found character '\\t' that cannot start any token"),
        ("a: *x", "f.yaml:1: not valid YAML: found undefined alias 'x'"),
        ("a: 1\n---\nb: 2", "f.yaml:2: not valid YAML: but found another document"),
        ("{[a]: 1}", "f.yaml:1: not valid YAML: found unhashable key"),
        ("a: !!python/object:os.system 1", "f.yaml:1: not valid YAML: could not determine a constructor"),
        ("a: \0", "f.yaml: not valid YAML: unacceptable character #x0000"),
        ("a: &x [*x]", "f.yaml: nested too deep, or a value holds itself through an alias"),
        ("[" * 3000, "f.yaml: nested too deep, or a value holds itself through an alias"),
    ],
)
def test_not_yaml(text: str, said: str) -> None:
    with pytest.raises(ArchspecError) as caught:
        parse(text)
    assert str(caught.value).startswith(said)


def test_aliases_that_multiply_end_in_one_message() -> None:
    """Ten lines that stand for ten thousand million values."""
    lines = ["a0: &a0 [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    with pytest.raises(ArchspecError) as caught:
        parse("\n".join(lines))
    assert str(caught.value) == "f.yaml: more than 100,000 values; aliases that repeat each other, perhaps"


def test_an_alias_is_a_value_like_others() -> None:
    assert parse("a: &x [1, 2]\nb: *x") == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3", "f.yaml:3: a: the key is written twice"),
        ("x:\n  - {size: 1,\n     size: 2}", "f.yaml:3: size: the key is written twice"),
    ],
)
def test_a_key_written_twice(text: str, said: str) -> None:
    with pytest.raises(ArchspecError) as caught:
        parse(text)
    assert str(caught.value) == said


def test_the_same_key_in_two_places_is_fine() -> None:
    assert parse("[{a: 1}, {a: 2}]") == [{"a": 1}, {"a": 2}]


# What is said about values that break a rule.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rate: 1\nitens: []", "f.yaml:2: itens: unknown key; did you mean 'items'? choose from rate, items, words"),
        (
            "rate: 1\nitems:\n  - size: 2\n  - sise: 2",
            "f.yaml:4: items.1.sise: unknown key; did you mean 'size'? choose from size, kind",
        ),
        ("rate: 1\nqqq: 1", "f.yaml:2: qqq: unknown key; choose from rate, items, words"),
        ("rate: 1\n'{rule}': 1", "f.yaml:2: {rule}: unknown key; choose from rate, items, words"),
        ("rate: 1\n7: 1", "f.yaml:2: 7: unknown key; choose from rate, items, words"),
        ("\nitems: []", "f.yaml:2: rate: this key is required"),
        ("items: []\nrate: fast", "f.yaml:2: rate = 'fast': input should be a valid number, unable to parse string"),
        ("rate: 1\nitems: 3", "f.yaml:2: items = 3: input should be a valid list"),
        ("rate: 1\nitems:\n\n- 3", "f.yaml:4: items.0 = 3: must be a mapping with keys from size, kind"),
        (
            "rate: 1\nitems: [{},\n {kind: smal}]",
            "f.yaml:3: items.1.kind = 'smal': did you mean 'small'? choose from small, large",
        ),
        ("rate: 1\nwords: [a, [b]]", "f.yaml:2: words.1: input should be a valid string"),
        ("\n\nrate: -1", "f.yaml:3: rate -1.0 must not be negative"),
        ("rate: 1\nitems:\n- {}\n- size: 1\n  kind: large", "f.yaml:5: items.1.kind: only {items.0} may be large"),
        ("rate: 1\nitems:\n- {}\n- &x {kind: large}", "f.yaml:4: items.1.kind: only {items.0} may be large"),
        ("- rate", "f.yaml:1: must be a mapping with keys from rate, items, words"),
        ("5", "f.yaml:1: 5: must be a mapping with keys from rate, items, words"),
        ("null", "f.yaml:1: None: must be a mapping with keys from rate, items, words"),
    ],
)
def test_broken_rule(text: str, said: str) -> None:
    assert message(text).split(" as a number")[0] == said


def test_every_broken_rule_is_told_with_its_own_line() -> None:
    lines = message("rate: fast\nitems:\n  - {size: x}\n  - {kind: y}").splitlines()
    assert [line.split(" = ")[0] for line in lines] == [
        "f.yaml:1: rate",
        "f.yaml:3: items.0.size",
        "f.yaml:4: items.1.kind",
    ]


def test_without_lines_only_the_source_is_named() -> None:
    with pytest.raises(ArchspecError, match=r"^a search: rate: this key is required$"):
        Document({}, "a search").validate(Outer)


def test_models_stay_as_they_are() -> None:
    """A model inside plain data is taken over, and nothing can be changed afterwards."""
    inner = Inner(size=3)
    outer = Document({"rate": 1, "items": [inner]}, "here").validate(Outer)
    assert outer.items == (inner,)
    for name in Outer.model_fields:
        with pytest.raises(ValueError, match="frozen"):
            setattr(outer, name, None)


# Writing.


def test_short_lists_stay_on_one_line_and_keys_in_order() -> None:
    data = {"b": [1, 2.5, "x"], "a": {"z": [{"y": None}], "c": 1e-5}}
    assert to_yaml(data) == "b: [1, 2.5, x]\na:\n  z:\n  - y: null\n  c: 1.0e-05\n"


@pytest.mark.parametrize(
    "word", ["1e-3", "60e3", "08", "1_0", "+1", ".5", "no", "on", "true", "null", "~", "", "=", "2024-01-01"]
)
def test_words_that_look_like_something_else_are_quoted(word: str) -> None:
    text = to_yaml({"x": word})
    assert text.strip() in (f"x: '{word}'", f'x: "{word}"')
    assert parse(text) == {"x": word}


_TEXT = st.text(PRINTABLE)
_PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT


@given(st.recursive(_PLAIN, lambda x: st.lists(x, max_size=4) | st.dictionaries(_TEXT, x, max_size=4), max_leaves=8))
def test_what_is_written_is_read_back(data: object) -> None:
    assert parse(to_yaml({"x": data})) == {"x": data}


class Part(Closed):
    depth: int = 1


class Whole(Closed):
    name: str = ""
    part: Part = Part()


def test_a_misplaced_key_is_told_its_place_and_all_unknown_keys_are_named() -> None:
    with pytest.raises(ArchspecError, match=r"f:1: depth: unknown key; it is a key of part: part.depth$"):
        Document.parse("depth: 2", "f").validate(Whole)
    with pytest.raises(ArchspecError, match=r"f:1: nam: unknown key; did you mean 'name'\?.*; also unknown: b, c$"):
        Document.parse("{nam: x, b: 1, c: 2}", "f").validate(Whole)
