"""Draft trees: lossless, of the right shape, and never worse than the chain of their depth."""

import copy
from collections import Counter

import pytest
import torch
from transformers import DynamicCache

from archspec.errors import ArchspecError
from archspec.modules import Draft
from archspec.schema import Document
from runners.features.chat import prompt_tokens
from runners.features.conversations import Conversation
from runners.features.store import FeatureStore
from runners.features.target import Target
from runners.training.decoding import Decoded, Decoding, Sampler, decode_plain, decode_speculative
from runners.training.settings import TreeSettings
from runners.training.tree import Nodes, _Trees, decode_tree
from tests.runners.drafts import KINDS, draft_of_kind
from tests.runners.sampled import assert_distributed, continuations, small_pair
from tests.runners.tiny import conversation, tiny_config, tiny_model, tiny_tokenizer

NEW_TOKENS = 24
STATIC, DYNAMIC = TreeSettings(branches=(3, 2, 1)), TreeSettings(steps=3, topk=3, tokens=10)
CHAINS = [TreeSettings(branches=(1, 1, 1)), TreeSettings(steps=3, topk=1, tokens=4)]


@pytest.fixture(scope="module", params=KINDS)
def draft(request: pytest.FixtureRequest, tiny_store: FeatureStore) -> Draft:
    return draft_of_kind(tiny_store, request.param)


@pytest.fixture(scope="module")
def prompts(target: Target, own_text: list[Conversation]) -> list[list[int]]:
    return [prompt_tokens(one, target.tokenizer) for one in own_text[:5]]


@pytest.fixture(scope="module")
def plain(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    return [decode_plain(target, prompt, NEW_TOKENS) for prompt in prompts]


def won(decoded: list[Decoded]) -> tuple[int, int]:
    """Cycles and accepted tokens of several texts."""
    return sum(len(one.accepted) for one in decoded), sum(sum(one.accepted) for one in decoded)


@pytest.mark.parametrize("shape", [STATIC, DYNAMIC], ids=str)
def test_a_tree_writes_what_plain_decoding_writes_in_no_more_cycles_than_its_chain(
    target: Target, prompts: list[list[int]], plain: list[list[int]], draft: Draft, shape: TreeSettings
) -> None:
    """Every kind of draft: positions, windows, masks and caches are right where no token can be told from the chain's.

    With wrong draft states the text would stay the same, so the cycles count too: the chain's proposals are among the
    tree's, and a path through others wins more.
    """
    trees = [decode_tree(target, draft, prompt, NEW_TOKENS, shape) for prompt in prompts]
    chains = [decode_speculative(target, draft, prompt, NEW_TOKENS, shape.depth) for prompt in prompts]
    assert [one.tokens for one in trees] == plain
    assert won(trees)[0] < won(chains)[0]
    assert max(max(one.accepted) for one in trees) == shape.depth


@pytest.mark.parametrize("shape", CHAINS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_a_tree_without_branches_is_the_chain_cycle_by_cycle(
    target: Target, prompts: list[list[int]], draft: Draft, shape: TreeSettings, temperature: float
) -> None:
    for prompt in prompts[:2]:
        random = [torch.Generator().manual_seed(5) for _ in range(2)]
        tree = decode_tree(target, draft, prompt, 16, shape, temperature=temperature, generator=random[0])
        chain = decode_speculative(target, draft, prompt, 16, 3, temperature=temperature, generator=random[1])
        assert tree == chain


def test_a_cache_that_holds_the_accepted_path_alone_is_not_cropped(
    target: Target, prompts: list[list[int]], tiny_store: FeatureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By 0 rows, which earlier transformers take for the length that is to be left."""
    cropped, crop = list[int](), DynamicCache.crop

    def noted(cache: DynamicCache, rows: int) -> None:
        cropped.append(rows)
        crop(cache, rows)

    monkeypatch.setattr(DynamicCache, "crop", noted)
    draft = draft_of_kind(tiny_store, "eagle3")
    decoded = [decode_tree(target, draft, prompt, NEW_TOKENS, CHAINS[0]) for prompt in prompts]
    assert max(max(one.accepted) for one in decoded) == 3
    assert max(cropped) < 0


def test_each_node_has_the_state_of_its_own_path(target: Target, prompts: list[list[int]], draft: Draft) -> None:
    """A node's children are those that a chain along its path, in a cache of its own, finds likeliest."""
    decoding = Decoding(target, draft, Sampler())
    with torch.no_grad():
        decoding.begin(prompts[0])
        aux, tokens = decoding._new_aux, list(decoding.tokens)
        nodes = _Trees(decoding, STATIC)._grow()
        assert nodes.depth.count(3) == 6
        for leaf in (node for node in range(len(nodes.token)) if nodes.depth[node] == 3):
            alone, path = Decoding(target, draft, Sampler()), nodes.path(leaf)
            alone._new_aux, alone.tokens = aux, tokens
            state, place = alone.read()
            for step, node in enumerate(path):
                log_p = draft.logits(state)[0, 0].log_softmax(-1)
                token = (draft.vocab_ids == nodes.token[node]).nonzero().item()
                wanted = nodes.score[node] - nodes.score[nodes.parent[node]]
                assert float(log_p[int(token)]) == pytest.approx(wanted, abs=2e-4)
                ids, positions = torch.tensor([[nodes.token[node]]]), torch.tensor([[place + 1 + step]])
                state = draft(ids, draft.feed_back(state), positions, alone.draft_cache)


def test_a_dynamic_tree_is_grown_and_pruned_as_eagle_2_does(target: Target, tiny_store: FeatureStore) -> None:
    """Fewer than all: ``topk`` nodes of a depth are expanded, and the likeliest stay, with everything above them."""
    decoding = Decoding(target, draft_of_kind(tiny_store, "eagle3"), Sampler())
    with torch.no_grad():
        decoding.begin(prompt_tokens(conversation("word " * 3), target.tokenizer))
        whole = _Trees(decoding, TreeSettings(steps=3, topk=3, tokens=22))
        decoding_state = decoding._new_aux, decoding.rows_read
        nodes = whole._grow()
        decoding.rows_read = decoding_state[1]
        decoding.draft_cache.truncate(decoding.rows_read)
        pruned = _Trees(decoding, DYNAMIC)._grow()
    assert [nodes.depth.count(depth) for depth in range(4)] == [1, 3, 9, 9]
    parents = Counter(nodes.parent[node] for node in range(1, 22) if nodes.depth[node] == 3)
    second = sorted((n for n in range(22) if nodes.depth[n] == 2), key=lambda n: -nodes.score[n])
    assert set(parents) == set(second[:3])
    best = sorted(nodes.score[1:], reverse=True)[:9]
    assert sorted(pruned.score[1:], reverse=True) == pytest.approx(best, abs=1e-5)
    assert all(0 <= pruned.parent[node] < node for node in range(1, 10))
    assert pruned == nodes.likeliest(10)


def test_nodes_that_are_equally_likely_keep_their_parents() -> None:
    nodes = Nodes([7])
    for parent, token in ((0, 1), (0, 2), (1, 3), (3, 4)):
        nodes.add(parent, token, 0.0)
    assert nodes.path(4) == [1, 3, 4]
    assert nodes.likeliest(3) == Nodes([7, 1, 2], [-1, 0, 0], [0, 1, 1], [0.0, 0.0, 0.0])
    assert nodes.likeliest(4).parent == [-1, 0, 0, 1]


@pytest.mark.parametrize("shape", [TreeSettings(branches=(2, 2)), TreeSettings(steps=2, topk=3, tokens=6)], ids=str)
@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_a_tree_keeps_the_targets_distribution(shape: TreeSettings, top_p: float) -> None:
    target, draft = small_pair()
    prompt, random = [0, 1, 2], torch.Generator().manual_seed(0)
    decoded = [
        decode_tree(target, draft, prompt, 3, shape, temperature=1.0, top_p=top_p, generator=random) for _ in range(200)
    ]
    assert won(decoded)[1] > 50
    assert_distributed([one.tokens for one in decoded], continuations(target, prompt, 3, 1.0, top_p))


def test_a_path_that_ends_the_text_is_cut(target: Target, tiny_store: FeatureStore) -> None:
    draft, prompt = draft_of_kind(tiny_store, "eagle3"), prompt_tokens(conversation("word " * 3), target.tokenizer)
    full = decode_tree(target, draft, prompt, 20, STATIC).tokens
    for end in dict.fromkeys(full):
        other = Target(target.model, target.tokenizer, "other")
        other.eos_token_ids = frozenset({end})
        assert decode_tree(other, draft, prompt, 20, STATIC).tokens == full[: full.index(end) + 1]


def test_a_text_beyond_the_targets_window_is_refused(target: Target, tiny_store: FeatureStore) -> None:
    from transformers import MistralConfig

    sizes = tiny_config().to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    options = {name: sizes[name] for name in (*names, "num_key_value_heads", "tie_word_embeddings")}
    windowed = Target(tiny_model(MistralConfig(**options, sliding_window=32)), tiny_tokenizer(), "windowed")
    draft = draft_of_kind(tiny_store, "eagle3")
    assert target.window is None
    assert decode_tree(windowed, draft, [1, 2, 3], 8, STATIC).tokens == decode_plain(windowed, [1, 2, 3], 8)
    with pytest.raises(ArchspecError, match=r"windowed: its layers see 32 tokens back, and prompt, .* have 39; draft"):
        decode_tree(windowed, draft, [1, 2, 3], 20, STATIC)


def test_the_window_is_that_of_the_narrowest_layer(target: Target) -> None:
    model = copy.copy(target.model)
    model.config = copy.deepcopy(target.model.config)
    other = Target(model, target.tokenizer, "other")
    for changes, window in (
        ({"layer_types": ["full_attention"] * 3, "sliding_window": 16}, None),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 16}, 16),
        ({"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 64}, 64),
        ({"layer_types": None, "sliding_window": 16, "use_sliding_window": False}, None),
        ({"layer_types": None, "sliding_window": 16, "use_sliding_window": True}, 16),
    ):
        for name, value in changes.items():
            setattr(model.config, name, value)
        assert other.window == window


def test_shapes_as_they_are_written() -> None:
    assert TreeSettings.parse("4x2x1") == TreeSettings(branches=(4, 2, 1))
    assert TreeSettings.parse("3") == TreeSettings(branches=(3,))
    assert TreeSettings.parse("4,4,16") == TreeSettings(steps=4, topk=4, tokens=16)
    assert [str(TreeSettings.parse(text)) for text in ("4x2x1", "4,4,16")] == ["4x2x1", "4,4,16"]
    assert (STATIC.depth, STATIC.verified) == (3, 1 + 3 + 6 + 6)
    assert (DYNAMIC.depth, DYNAMIC.verified) == (3, 10)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("4,4", "tree '4,4': write 4x2x1 for branches, or 4,4,16 for steps, topk and tokens"),
        ("4xa", "tree '4xa': write 4x2x1"),
        ("", "tree '': write 4x2x1"),
        ("3,2,20", r"tokens: 3 steps with topk 2 draft 10 tokens, .* must be at most 11"),
        ("3,2,1", r"tree '3,2,1': tokens = 1: input should be greater than or equal to 2"),
        ("2x0", r"tree '2x0': branches.1 = 0: input should be greater than 0"),
    ],
)
def test_what_is_no_tree_is_told(text: str, told: str) -> None:
    with pytest.raises(ArchspecError, match=told):
        TreeSettings.parse(text)


@pytest.mark.parametrize(
    "data",
    [{}, {"steps": 3, "topk": 2}, {"branches": [2], "topk": 2}, {"branches": [2], "steps": 1, "topk": 1, "tokens": 2}],
)
def test_a_tree_has_one_shape(data: dict[str, object]) -> None:
    with pytest.raises(ArchspecError, match=r"has either branches or all of steps, topk and tokens: \{branches: "):
        Document(data, "file").validate(TreeSettings)


def test_a_tree_has_a_depth() -> None:
    with pytest.raises(ArchspecError, match=r"branches: .*must hold the children at each depth, as in \[4, 2, 1\]"):
        Document({"branches": []}, "file").validate(TreeSettings)
