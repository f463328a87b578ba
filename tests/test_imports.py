"""The import arrow ``archspec <- search_spaces <- runners <- cli`` and the one inside ``runners``, read from source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ARROW = ("archspec", "search_spaces", "runners", "cli")
INNER_ARROW = ("features", "training", "speed", "serving", "search", "display", "commands")
RAY_FILES = "runners/search/ray_"


def imports(tree: ast.AST, module: str) -> Iterator[str]:
    """Dotted names that a module imports, wherever in it; ``module`` is its own name, for relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            yield ".".join((*above, *((node.module,) if node.module else ())))


def sources() -> list[str]:
    """Every module of the product, relative to the repository."""
    folders = [path for name in ARROW[:-1] for path in sorted((ROOT / name).rglob("*.py"))]
    return [str(path.relative_to(ROOT)) for path in (*folders, ROOT / "cli.py")]


def packages(source: str) -> set[str]:
    """Top-level packages that the module at ``source`` imports."""
    tree = ast.parse((ROOT / source).read_text(encoding="utf-8"))
    module = source.removesuffix(".py").replace("/", ".")
    return {name.split(".")[0] for name in imports(tree, module)}


def against_the_arrow(package: str, imported: set[str]) -> set[str]:
    """What ``package`` must not import: whatever stands right of it."""
    return imported & set(ARROW[ARROW.index(package) + 1 :])


@pytest.mark.parametrize("source", sources())
def test_imports_follow_the_arrow(source: str) -> None:
    package = source.split("/")[0].removesuffix(".py")
    assert not against_the_arrow(package, packages(source))
    assert not packages(source) & {"tests", "benchmarks"}


@pytest.mark.parametrize("source", [source for source in sources() if source.count("/") == 2 and "runners/" in source])
def test_imports_inside_runners_follow_their_arrow(source: str) -> None:
    tree = ast.parse((ROOT / source).read_text(encoding="utf-8"))
    inner = {name.split(".")[1] for name in imports(tree, source) if name.startswith("runners.")}
    assert not inner & set(INNER_ARROW[INNER_ARROW.index(source.split("/")[1]) + 1 :])


def test_ray_is_imported_in_its_own_files_alone() -> None:
    with_ray = {source for source in sources() if "ray" in packages(source)}
    assert "runners/search/ray_runner.py" in with_ray
    assert all(source.startswith(RAY_FILES) for source in with_ray)
    for source in set(sources()) - with_ray:
        tree = ast.parse((ROOT / source).read_text(encoding="utf-8"))
        inner = [name for name in imports(tree, source) if name.startswith("runners.search.ray_")]
        assert not inner or source in ("runners/search/session.py", "runners/search/ray_train.py"), source


def test_a_spec_knows_nothing_of_optuna() -> None:
    assert not [source for source in sources() if source.startswith("archspec/") and "optuna" in packages(source)]


def test_the_walk_sees_every_kind_of_import() -> None:
    """So that the tests above cannot pass by seeing nothing."""
    text = (
        "import a.b, c as d\nfrom e.f import g\nfrom . import h\nfrom .i import j\nfrom ..k import l\ndef m(): import n"
    )
    found = set(imports(ast.parse(text), "runners.deep.module"))
    assert found == {"a.b", "c", "e.f", "runners.deep", "runners.deep.i", "runners.k", "n"}
    assert against_the_arrow("search_spaces", {"archspec", "runners", "cli", "torch"}) == {"runners", "cli"}
    assert {"archspec/spec.py", "cli.py"} <= set(sources())
    assert {"pydantic", "archspec"} <= packages("archspec/spec.py")
