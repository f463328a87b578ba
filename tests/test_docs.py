"""The documentation held to the code: fields, defaults, columns, commands, examples, links and the worked example."""

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import numpy as np
import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.main import get_command

from archspec.facts import TargetFacts
from archspec.presets import load_preset, preset_names
from archspec.resolve import resolve
from archspec.schema import Document
from archspec.spec import DraftSpec
from runners.features.conversations import parse_row
from runners.search.result import BestConfig, Metrics, Standing, Sureness, Verdict
from runners.search.search_file import SearchFile
from search_spaces import Candidate, Space, ready_space_names
from search_spaces.constraints import Bound, ByteBound
from search_spaces.domains import Labelled, Range
from tests.smollm2 import SMOLLM2

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "README.md"])


# Reading a page


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next of its own or a higher level."""
    lines = text.splitlines()
    start = lines.index(heading)
    level = len(heading.split()[0])
    ends = (i for i in range(start + 1, len(lines)) if re.match(rf"#{{1,{level}}} ", lines[i]))
    return "\n".join(lines[start + 1 : next(ends, len(lines))])


def rows(text: str) -> Iterator[list[str]]:
    """Cells of every table row, headings and rules left out."""
    lines = text.splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("|") and not line.startswith("|--") and not after.startswith("|--"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def keys(text: str) -> set[str]:
    """Every name in backquotes in the first column of the tables."""
    return {name for row in rows(text) for name in re.findall(r"`([^`]+)`", row[0])}


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """(info string, content) of every fenced block."""
    for info, content in re.findall(r"^```([^\n]*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        yield info.strip(), content


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# Fields


def fields(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(dotted path, field) of every value that may be set; a part that is always there is its fields."""
    for name, field in model.model_fields.items():
        path, inner = f"{above}{name}", model_in(field.annotation)
        listed = "tuple[" in str(field.annotation)
        if inner is None or listed or inner is not field.annotation:
            yield path, field
        if inner is not None and inner not in (Bound, ByteBound):
            yield from fields(inner, f"{path}.N." if listed else f"{path}.")


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The one model that a value of this type holds, if it is a model or an optional or listed one."""
    kinds = (annotation, *get_args(annotation))
    models = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return models[0] if models else None


def documented_default(cell: str) -> Any:
    return Document.parse(cell.strip("`"), "docs").data


def search_fields() -> list[tuple[str, FieldInfo]]:
    """Those of the search file; space and base may also be written as a name, and a base is a spec."""
    found = [(path, field) for path, field in fields(SearchFile) if not path.startswith("space.base.")]
    named = {"space": SearchFile.model_fields["space"], "space.base": Space.model_fields["base"]}
    return [*found, *named.items()]


@pytest.mark.parametrize(("name", "found"), [("spec.md", list(fields(DraftSpec))), ("search.md", search_fields())])
def test_every_field_is_documented_with_its_default(name: str, found: list[tuple[str, FieldInfo]]) -> None:
    table = {row[0].strip("`"): row for row in rows(section(page(name), "## Fields"))}
    assert set(table) == {path for path, _ in found}
    for path, field in found:
        if field.is_required():
            assert table[path][2] == "required", path
        elif model_in(field.annotation) is None or field.default is None:
            written = json.loads(json.dumps(field.get_default(call_default_factory=True)))
            assert documented_default(table[path][2]) == written, path


def test_the_walk_sees_parts_lists_and_optional_parts() -> None:
    """So that the test above cannot pass by seeing nothing."""
    paths = {path for path, _ in fields(DraftSpec)}
    assert {"name", "inputs.norm", "layers", "layers.N.attention", "layers.N.attention.heads", "head.norm"} <= paths
    paths = {path for path, _ in search_fields()}
    assert {"features.path", "space.choices", "fixed", "constraints.bytes", "budget.rungs", "objective.draft"} <= paths


def test_constraints_domains_and_target_facts_are_documented() -> None:
    search = page("search.md")
    bounds = {f"constraints.{name}.{side}" for name in ("params", "trainable_params") for side in Bound.model_fields}
    bounds |= {f"constraints.bytes.{name}" for name in ByteBound.model_fields}
    assert bounds <= keys(section(search, "## Constraints"))
    domains = section(search, "### Domains")
    assert all(name in domains for name in (*Range.model_fields, *Labelled.model_fields))
    assert {f"target.{name}" for name in TargetFacts.model_fields} == keys(section(page("spec.md"), "## Resolving"))


def test_every_choice_of_a_word_is_named() -> None:
    """Literal values stand in the type column of their field."""
    for name, found in (("spec.md", list(fields(DraftSpec))), ("search.md", search_fields())):
        table = {row[0].strip("`"): row[1] for row in rows(section(page(name), "## Fields"))}
        for path, field in found:
            words = [word for word in get_args(field.annotation) if isinstance(word, str)]
            assert all(f"`{word}`" in table[path] for word in words), path


# Results


def test_every_leaderboard_column_is_documented() -> None:
    from runners.search.driver import Search
    from runners.search.leaderboard import _row
    from runners.search.record import Record
    from runners.search.scores import Scorer

    file = Document.parse(next(text for info, text in blocks(page("search.md")) if info == "yaml search"), "docs")
    spec = load_preset("eagle3")
    store = SimpleNamespace(fingerprint="", manifest=SimpleNamespace(text_origin="own"))
    loaded = file.validate(SearchFile)
    study = SimpleNamespace(scorer=Scorer(loaded, None))
    search = cast("Search", SimpleNamespace(file=loaded, store=store, study=study))
    columns = _row(search, Record(0, Candidate(resolve(spec, SMOLLM2), spec, {}), None), None, on_front=False)
    named = {name for name in columns if not re.fullmatch(r"alpha_[1-9]", name)}
    assert keys(section(page("search.md"), "## Leaderboard")) == named


def test_every_field_of_best_config_is_documented() -> None:
    expected = set(BestConfig.model_fields) | {f"metrics.{name}" for name in Metrics.model_fields}
    expected |= {f"runners_up.N.{name}" for name in Standing.model_fields}
    assert keys(section(page("search.md"), "## best-config.json")) == expected
    verdict = keys(section(page("search.md"), "## The verdict"))
    names = {f"verdict.{name}" for name in Verdict.model_fields}
    assert verdict == names | set(get_args(Sureness))


def test_every_record_and_failure_kind_is_documented() -> None:
    from runners.features.store import Manifest, StoreKey
    from runners.search.executor import FailureKind
    from runners.training.acceptance import Acceptance

    record = keys(section(page("acceptance.md"), "## The record"))
    assert record == {field.name for field in dataclasses.fields(Acceptance)}
    assert keys(section(page("search.md"), "## Failures")) == set(get_args(FailureKind))
    manifest = set(Manifest.model_fields) - {"key"} | {f"key.{name}" for name in StoreKey.model_fields}
    assert manifest <= keys(section(page("features.md"), "## The store"))


# Tables that list


def test_presets_table_lists_the_presets() -> None:
    assert [row[0].strip("`") for row in rows(section(page("spec.md"), "## Presets"))] == preset_names()


def test_ready_spaces_table_lists_the_spaces_with_question_and_size() -> None:
    table = list(rows(section(page("search.md"), "## Ready spaces")))
    assert [row[0].strip("`") for row in table] == ready_space_names()
    for name, question, size in table:
        space = Space.load(name.strip("`"))
        assert (question, int(size)) == (space.describe, space.grid_size())


# Commands


def command_line() -> dict[str, Any]:
    from cli import app

    return dict(cast("Any", get_command(app)).commands)


def test_every_command_and_option_is_documented() -> None:
    text = page("cli.md")
    assert set(re.findall(r"^## `archspec ([a-z-]+)`$", text, flags=re.MULTILINE)) == set(command_line())
    for name, command in command_line().items():
        about = section(text, f"## `archspec {name}`")
        options = [word for option in command.params if option.param_type_name == "option" for word in option.opts]
        assert [word for word in options if f"`{word}`" not in about] == [], name
        assert any(info == "sh" and f"archspec {name}" in block for info, block in blocks(about)), name


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_command_lines_parse(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if re.match(r"( {4})?archspec [a-z-]+ ", line)]
    for line in lines:
        name, *words = shlex.split(line.split(">")[0], comments=True)[1:]
        command_line()[name].make_context(name, words)


# Examples


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_marked_yaml_blocks_load(path: Path) -> None:
    kinds: dict[str, type[BaseModel]] = {"spec": DraftSpec, "space": Space, "search": SearchFile}
    for info, text in blocks(path.read_text(encoding="utf-8")):
        language, _, mark = info.partition(" ")
        if language == "yaml":
            assert mark in (*kinds, "part"), f"mark the block as one of {', '.join(kinds)}, or part"
        if language == "yaml" and mark in kinds:
            Document.parse(text, name_of(path)).validate(kinds[mark])


def test_conversation_examples_are_read() -> None:
    examples = [text for info, text in blocks(page("features.md")) if info == "json conversation"]
    read = [parse_row(json.loads(text), "docs") for text in examples]
    assert len(read) == 5
    assert all(conversation.messages[0].role == "user" for conversation in read)


def test_links_resolve() -> None:
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", link):
                continue
            file, _, anchor = link.partition("#")
            goal = (path.parent / file).resolve() if file else path
            assert goal.exists(), f"{name_of(path)}: {link}"
            if anchor:
                headings = re.findall(r"^#+ (.+)$", goal.read_text(encoding="utf-8"), flags=re.MULTILINE)
                slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
                assert anchor in slugs, f"{name_of(path)}: {link}"


# The worked example


def test_worked_acceptance_example() -> None:
    from runners.training.acceptance import Counts, count_cycles

    matches, figures = (
        list(rows(part)) for part in section(page("acceptance.md"), "## A worked example").split("\n| figure")
    )
    starts = [int(row[0]) for row in matches if row[5]]
    accepted = [int(re.findall(r"a = (\d)", row[5])[0]) for row in matches if row[5]]
    chances = np.array([[float(cell == "1") for cell in row[2:5]] for row in matches])
    told = {row[0]: [number(text) for text in row[1].split("=")[-1].split(",")] for row in figures}

    def length(counts: Counts) -> float:
        return 1 + float(counts.accepted.sum()) / counts.cycles

    counts = count_cycles(chances)
    assert chances.shape == (9, 3)
    assert [start + a + 1 for start, a in zip(starts, accepted, strict=True)][:-1] == starts[1:]
    assert (len(starts), sum(accepted)) == (counts.cycles, counts.accepted.sum())
    assert told["cycles"] == [counts.cycles]
    assert told["accepted"] == [counts.accepted.sum()]
    assert told["acceptance length"] == [length(counts)]
    assert told["acceptance rate"] == [counts.accepted.sum() / (3 * counts.cycles)]
    assert told["reached step 0, 1, 2"] == counts.reached.tolist()
    assert told["accepted step 0, 1, 2"] == counts.accepted.tolist()
    assert told["conditional 0, 1, 2"] == (counts.accepted / counts.reached).tolist()
    assert told["per position 0, 1, 2"] == (counts.accepted / counts.cycles).tolist()
    for k in (1, 2, 3):
        assert told[f"length by k = {k}"] == pytest.approx([length(count_cycles(chances[:, :k]))])


def test_worked_example_of_rows() -> None:
    text = section(page("acceptance.md"), "## A worked example")
    table = [row[2:5] for row in rows(text.split("\n| figure")[0])]
    steps = [[row[step] for row in table if row[step] != "-"] for step in range(3)]
    right = [(step.count("1"), len(step)) for step in steps]
    assert "step 0 is right in {} of {}, step 1 in {} of {}, step 2 in {} of {}".format(*sum(right, ())) in text
    terms = np.cumprod([hits / of for hits, of in right])
    assert " + ".join(["1", *(f"{term:.3f}" for term in terms)]) + f" = {1 + terms.sum():.2f}" in text


def number(text: str) -> float:
    top, _, bottom = text.strip().partition("/")
    return float(top) / float(bottom or 1)
