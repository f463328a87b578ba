"""The architectures that people compare today, one YAML file each, and how a preset or a file is found by name."""

from importlib.resources import files
from pathlib import Path

from archspec.errors import ArchspecError, nearest
from archspec.schema import Document
from archspec.spec import DraftSpec

_FOLDER = files("archspec") / "presets"


def preset_names() -> list[str]:
    """Names of all presets, sorted."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _FOLDER.iterdir() if entry.name.endswith(".yaml"))


def preset_text(name: str) -> str:
    """The preset's YAML as written, comments included.

    Raises:
        ArchspecError: no preset has that name; the message suggests the nearest.
    """
    if name not in preset_names():
        raise ArchspecError(f"{name!r} is no preset: {nearest(name, preset_names())}")
    return (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def load_preset(name: str) -> DraftSpec:
    """The preset called ``name``.

    Raises:
        ArchspecError: no preset has that name.
    """
    return _preset_document(name).validate(DraftSpec)


def load_document(name_or_path: str) -> Document:
    """A preset by name, or a file by path (anything with a folder or a file suffix), with its lines.

    Raises:
        ArchspecError: neither a preset nor a readable file.
    """
    path = Path(name_or_path)
    looks_like_file = path.suffix in (".yaml", ".yml", ".json") or len(path.parts) > 1
    return Document.load(path) if looks_like_file else _preset_document(name_or_path)


def load_spec(name_or_path: str) -> DraftSpec:
    """The spec of ``load_document``.

    Raises:
        ArchspecError: neither a preset nor a readable, valid file.
    """
    return load_document(name_or_path).validate(DraftSpec)


def _preset_document(name: str) -> Document:
    return Document.parse(preset_text(name), f"preset {name}")
