"""What vLLM's own Python runs: decode prompts greedily, with a draft or without, and tell what the engine counted.

Called as ``python -I vllm_worker.py REQUEST ANSWER``, two JSON files; ``Request`` and ``Answer`` in ``engine.py`` say
what stands in them. It runs in an environment without this project, so it imports the standard library, safetensors,
torch and vllm alone. Facts about vLLM are from version 0.32.0.
"""

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# vLLM joins these parameters; a checkpoint holds their parts (llama_eagle3.py, ``hf_to_vllm_mapper``).
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
RENAMED = {"draft_id_to_target_id": "d2t"}
COUNTERS = "vllm:spec_decode_"


def main(request_file: str, answer_file: str) -> None:
    """Answer one request; the answer is written whole or not at all."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    answer: dict[str, Any] = {"stage": "import"}
    try:
        serve(request, answer)
    except BaseException as error:  # whatever ends the engine is what the user needs to read
        traceback.print_exc()
        answer["error"] = f"{type(error).__name__}: {error}"
    temporary = Path(f"{answer_file}.part")
    temporary.write_text(json.dumps(answer), encoding="utf-8")
    temporary.replace(answer_file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an engine that was loaded in this process does not always let it end


def serve(request: dict[str, Any], answer: dict[str, Any]) -> None:
    """Fill ``answer``; its ``stage`` is that which was reached."""
    clock, seconds = time.perf_counter(), answer.setdefault("seconds", {})
    import vllm

    answer |= {"version": vllm.__version__, "device": _device()}
    clock = _lap(seconds, "import", clock)
    answer["stage"] = "load"
    speculative = request["speculative"]
    engine = vllm.LLM(
        model=request["target"],
        speculative_config=speculative,
        dtype="float32",  # in bfloat16 the greedy text depends on the batch size even without a draft
        skip_tokenizer_init=True,  # prompts come and responses go as token ids
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
        **request["options"],
    )
    clock = _lap(seconds, "load", clock)
    if speculative is not None:
        answer |= look_inside(engine, Path(speculative["model"]))
    answer["stage"] = "decode"
    sampling = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=request["max_new_tokens"],
        stop_token_ids=request["stop_token_ids"],
        ignore_eos=True,  # the end tokens are those above, for the engine and for the evaluator alike
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    answer["responses"] = [list(output.outputs[0].token_ids) for output in outputs]
    _lap(seconds, "decode", clock)
    answer["counters"] = counters(engine)
    answer["stage"] = "done"


def counters(engine: Any) -> dict[str, Any]:
    """The engine's own counts of speculative decoding, by the names it gives them."""
    found: dict[str, Any] = {}
    for metric in engine.get_metrics():
        if metric.name.startswith(COUNTERS):
            values = getattr(metric, "values", None)
            found[metric.name.removeprefix(COUNTERS)] = metric.value if values is None else list(values)
    return found


def look_inside(engine: Any, folder: Path) -> dict[str, Any]:
    """``missing`` and ``unused`` tensors, ``aux_layers`` in use and ``vocabulary``, or ``hidden``: why none is told.

    vLLM does not complain of tensors that a checkpoint lacks, whose parameters stay as they were allocated, nor of
    biases that it has no parameter for (models/utils.py, ``ignore_unexpected_suffixes``).
    """
    try:
        runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
        drafter = getattr(runner, "drafter", None) or runner.speculator
        target, draft = runner.model, drafter.model
        shared = {id(parameter) for parameter in target.parameters()}
        own = [name for name, parameter in draft.named_parameters() if id(parameter) not in shared]
        everything = [name for name, _ in (*draft.named_parameters(remove_duplicate=False), *draft.named_buffers())]
        aux = (getattr(module, "aux_hidden_state_layers", ()) for module in target.modules())
        tensors = tensor_names(folder)
        return {
            "missing": missing(own, tensors),
            "unused": unused(everything, tensors),
            "aux_layers": list(next(filter(None, aux), ())),
            "vocabulary": vocabulary(getattr(draft, "draft_id_to_target_id", None)),
        }
    except Exception as error:  # the engine's insides have no stable interface
        return {"hidden": f"{type(error).__name__}: {error}"}


def missing(parameters: list[str], tensors: set[str]) -> list[str]:
    """Checkpoint names that these parameters need and that ``tensors`` does not have.

    ``hidden_norm`` of layers after the first exists and is never used.
    """
    needed = _needed(parameters)
    idle = {name for name in needed if ".hidden_norm." in name and not name.startswith("layers.0.")}
    return sorted(needed - idle - set(map(_plain, tensors)))


def unused(parameters: list[str], tensors: set[str]) -> list[str]:
    """Tensors of a checkpoint that belong to none of these parameters; ``t2d`` is what d2t says already."""
    return sorted(set(map(_plain, tensors)) - _needed(parameters) - {"t2d"})


def vocabulary(offsets: Any) -> str | None:
    """16 hex digits over the offsets [D] from draft ids to target ids; None for a draft with the whole vocabulary."""
    if offsets is None:
        return None
    return hashlib.sha256(",".join(map(str, offsets.tolist())).encode()).hexdigest()[:16]


def tensor_names(folder: Path) -> set[str]:
    """Names of all tensors in the safetensors files of ``folder``."""
    from safetensors import safe_open

    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            names.update(opened.keys())
    return names


def _plain(name: str) -> str:
    """One name for what vLLM and checkpoints call differently."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    return RENAMED.get(name, name)


def _needed(parameters: list[str]) -> set[str]:
    return {part for name in parameters for part in _parts(_plain(name))}


def _parts(name: str) -> Iterator[str]:
    for joined, parts in JOINED.items():
        if f".{joined}." in name:
            yield from (name.replace(joined, part) for part in parts)
            return
    yield name


def _device() -> str:
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"


def _lap(seconds: dict[str, float], name: str, since: float) -> float:
    now = time.perf_counter()
    seconds[name] = round(now - since, 2)
    return now


if __name__ == "__main__":
    main(*sys.argv[1:])
