"""A target as a Hugging Face folder, which is what engines read: vLLM reads no GGUF."""

import json
from pathlib import Path

from torch import Tensor

from archspec.errors import ArchspecError
from archspec.files import save_tensors, write_json
from runners.features.locate import locate
from runners.features.target import Target, load_target


def model_folder(model: str, fingerprint: str, work: Path, trust_remote_code: bool = False) -> str:
    """The folder or hub name of ``model``; a GGUF file is saved in float32 once, as ``work/target-FINGERPRINT``.

    Raises:
        ArchspecError: the target cannot be loaded, or a file to be saved is another target than ``fingerprint``.
    """
    place = locate(model)
    if place.gguf is None:
        return str(Path(place.folder).absolute()) if Path(place.folder).is_dir() else place.folder
    folder = work / f"target-{fingerprint}"
    if not (folder / "config.json").is_file():
        target = load_target(model, "float32", "cpu", trust_remote_code)
        require_target(target, fingerprint, model)
        save_model(target, folder)
    return str(folder.absolute())


def save_model(target: Target, folder: Path) -> None:
    """Write tokenizer, weights and, last, the config. transformers itself refuses to save what it read from GGUF."""
    folder.mkdir(parents=True, exist_ok=True)
    target.tokenizer.save_pretrained(folder)
    save_tensors(folder / "model.safetensors", _distinct(target), {"format": "pt"})
    config = json.loads(target.model.config.to_json_string())
    config.pop("quantization_config", None)
    config |= {"architectures": [type(target.model).__name__], "dtype": str(target.dtype).removeprefix("torch.")}
    write_json(folder / "config.json", config)


def require_target(target: Target, fingerprint: str, name: str) -> None:
    """Two models of equal sizes are two targets.

    Raises:
        ArchspecError: ``target`` has another fingerprint.
    """
    if target.fingerprint != fingerprint:
        raise ArchspecError(f"{name}: is target {target.fingerprint}, but draft and store are for target {fingerprint}")


def _distinct(target: Target) -> dict[str, Tensor]:
    """Every tensor once: tied ones under the name that comes first, as checkpoints have them."""
    found: dict[str, Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in target.model.state_dict().items():
        place = (tensor.data_ptr(), tuple(tensor.shape))
        if place not in seen:
            seen.add(place)
            found[name] = tensor
    return found
