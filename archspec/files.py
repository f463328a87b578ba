"""Files are written whole or not at all: to a temporary name beside the target, then moved over it."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archspec.errors import ArchspecError

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in ``path``'s folder; on success it takes ``path``'s place, on failure it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def exclusive(folder: Path, rule: str) -> Iterator[None]:
    """Hold ``folder``'s lock, which the system drops when this process ends in whatever way; the folder is made.

    Raises:
        ArchspecError: another process holds it; ``rule`` says what that means.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArchspecError(f"{folder}: {rule}") from None
        yield


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, data: Any) -> None:
    """Write ``data`` as indented JSON with a final newline; NaN is refused, since JSON has none."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def save_tensors(path: Path, tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str] | None = None) -> None:
    """Write ``tensors`` as one safetensors file; views are made contiguous first."""
    from safetensors.torch import save_file

    with replacing(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, dict(metadata or {}))
