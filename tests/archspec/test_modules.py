"""What each layer choice computes, written out as DESIGN's words have it.

A single row attends to itself alone, so its attention is ``o(v(read))`` and every layer is a short formula.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archspec.attention import UnrollMemory
from archspec.builder import build_draft
from archspec.modules import Draft, DraftLayer, GatedMlp, MlpStack, RmsNorm
from archspec.resolve import resolve
from archspec.spec import DraftSpec
from tests.archspec.strategies import TOY

Formula = Callable[[DraftLayer, Tensor, Tensor], Tensor]


def make(*layers: dict[str, Any], **fields: Any) -> Draft:
    """A draft whose parameters are all random, norms included."""
    torch.manual_seed(0)
    draft = build_draft(resolve(DraftSpec.model_validate({"name": "test", "layers": layers} | fields), TOY)).double()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return draft


def run(draft: Draft, index: int, e: Tensor, x: Tensor) -> Tensor:
    """Layer ``index`` on one row."""
    rotary = {size: table(torch.tensor([[5]])) for size, table in draft.rotaries.items()}
    out: Tensor = draft.layers[index](e.view(1, 1, -1), x.view(1, 1, -1), rotary, UnrollMemory())
    return out[0, 0]


def norm(x: Tensor, module: nn.Module) -> Tensor:
    assert isinstance(module, nn.RMSNorm)
    return x / (x.pow(2).mean() + TOY.norm_eps).sqrt() * module.weight


def attend(layer: DraftLayer, read: Tensor) -> Tensor:
    """One row's attention: its own value, once for every query head that shares it."""
    assert layer.attention is not None
    value = (layer.attention.v_proj.weight @ read).view(-1, layer.attention.head_dim)
    heads = layer.attention.q_proj.out_features // layer.attention.head_dim
    return layer.attention.o_proj.weight @ value.repeat_interleave(heads // len(value), 0).flatten()


def linear(module: nn.Module | None, x: Tensor) -> Tensor:
    assert isinstance(module, nn.Linear)
    return module.weight @ x if module.bias is None else module.weight @ x + module.bias


def both(e: Tensor, x: Tensor, layer: DraftLayer) -> tuple[Tensor, Tensor]:
    return norm(e, layer.embed_norm), norm(x, layer.state_norm)


def projected(layer: DraftLayer, e: Tensor, x: Tensor) -> Tensor:
    x = linear(layer.project, torch.cat((e, x)))
    return x + attend(layer, norm(x, layer.state_norm))


def concat_normed(layer: DraftLayer, e: Tensor, x: Tensor) -> Tensor:
    e, x = both(e, x, layer)
    return x + attend(layer, torch.cat((e, x)))


def concat_normed_wide(layer: DraftLayer, e: Tensor, x: Tensor) -> Tensor:
    pair = torch.cat(both(e, x, layer))
    return pair + attend(layer, pair)


def unnormed_projection(layer: DraftLayer, e: Tensor, x: Tensor) -> Tensor:
    x = linear(layer.project, torch.cat((e, x)))
    return x + attend(layer, x)


FUSED = {"fusion": "add"}  # some layer of a draft must read the embedding
NO_MLP = {"mlp": {"depth": 0}}
WIDE = {"stream": "2h"}
NORMED = {"residual_from": "normed"}

# name: (fields of the layer, what it computes from e and x)
LAYERS: dict[str, tuple[dict[str, Any], Formula]] = {
    "none": ({"fusion": "none"}, lambda m, e, x: x + attend(m, norm(x, m.state_norm))),
    "none, residual normed": (
        {"fusion": "none"} | NORMED,
        lambda m, e, x: norm(x, m.state_norm) + attend(m, norm(x, m.state_norm)),
    ),
    "none, widened": (
        {"fusion": "none"} | WIDE,
        lambda m, e, x: linear(m.residual_map, x) + attend(m, norm(x, m.state_norm)),
    ),
    "concat": ({"fusion": "concat"}, lambda m, e, x: x + attend(m, torch.cat(both(e, x, m)))),
    "concat, residual normed": ({"fusion": "concat"} | NORMED, concat_normed),
    "concat, widened": (
        {"fusion": "concat"} | WIDE,
        lambda m, e, x: torch.cat((e, x)) + attend(m, torch.cat(both(e, x, m))),
    ),
    "concat, widened, residual normed": ({"fusion": "concat"} | WIDE | NORMED, concat_normed_wide),
    "concat without norms": (
        {"fusion": "concat", "attention": {"norm": "none"}},
        lambda m, e, x: x + attend(m, torch.cat((e, x))),
    ),
    "project": ({"fusion": "project"}, projected),
    "project with bias": ({"fusion": "project", "fusion_bias": True}, projected),
    "project, widened": ({"fusion": "project"} | WIDE, projected),
    "project without norm": ({"fusion": "project", "attention": {"norm": "none"}}, unnormed_projection),
    "project without attention": (
        {"fusion": "project", "attention": "none", "mlp": {"depth": 1}},
        lambda m, e, x: m.mlps(linear(m.project, torch.cat((e, x)))),
    ),
    "add": (
        {"fusion": "add"},
        lambda m, e, x: x + attend(m, norm(x, m.state_norm) + linear(m.embed_map, norm(e, m.embed_norm))),
    ),
    "add with bias, widened": (
        {"fusion": "add", "fusion_bias": True} | WIDE,
        lambda m, e, x: (
            linear(m.residual_map, x) + attend(m, norm(x, m.state_norm) + linear(m.embed_map, norm(e, m.embed_norm)))
        ),
    ),
}


@pytest.mark.parametrize("case", LAYERS)
def test_first_layer(case: str) -> None:
    fields, formula = LAYERS[case]
    draft = make(NO_MLP | fields, FUSED)
    layer = draft.layers[0]
    assert isinstance(layer, DraftLayer)
    e, x = torch.randn(2, 16, dtype=torch.float64)
    torch.testing.assert_close(run(draft, 0, e, x), formula(layer, e, x))


def test_deeper_layers_on_a_wide_stream() -> None:
    """2h stays 2h with a plain residual, and becomes h again through a linear map; attention reads h + 2h."""
    draft = make({"stream": "2h"}, NO_MLP | {"fusion": "concat"} | WIDE, NO_MLP | {"fusion": "concat"})
    kept, narrowed = draft.layers[1], draft.layers[2]
    assert isinstance(kept, DraftLayer)
    assert isinstance(narrowed, DraftLayer)
    e, x = torch.randn(16, dtype=torch.float64), torch.randn(32, dtype=torch.float64)
    torch.testing.assert_close(run(draft, 1, e, x), x + attend(kept, torch.cat(both(e, x, kept))))
    expected = linear(narrowed.residual_map, x) + attend(narrowed, torch.cat(both(e, x, narrowed)))
    torch.testing.assert_close(run(draft, 2, e, x), expected)


@pytest.mark.parametrize(
    ("residual", "shared"), [(True, "own"), (True, "shared"), (False, "own")], ids=["own", "shared", "bare"]
)
def test_three_mlps_in_a_row(residual: bool, shared: str) -> None:
    layer = make(FUSED | {"mlp": {"depth": 3, "residual": residual, "norm": shared}}).layers[0]
    assert isinstance(layer, DraftLayer)
    assert isinstance(layer.mlps, MlpStack)
    x = torch.randn(16, dtype=torch.float64)
    out, inner = x, norm(x, layer.mlps.norms[0])
    for i, mlp in enumerate(layer.mlps.mlps):
        if residual:
            out = out + _gated(mlp, norm(out, layer.mlps.norms[0 if shared == "shared" else i]))
        else:
            inner = _gated(mlp, inner)
    torch.testing.assert_close(layer.mlps(x), out if residual else x + inner)


def _gated(mlp: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(mlp, GatedMlp)
    gate, up = linear(mlp.gate_proj, x), linear(mlp.up_proj, x)
    return linear(mlp.down_proj, gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("kind", ["none", "joint", "each", "target"])
def test_aux_states_are_normed_then_joined_then_projected(kind: str) -> None:
    count = 1 if kind == "target" else 3
    draft = make(FUSED, inputs={"aux_layers": [2, 4, 8][-count:], "norm": kind, "bias": True})
    aux = torch.randn(1, 1, count, 16, dtype=torch.float64)
    states = list(aux[0, 0])
    if kind in ("each", "target"):
        states = [norm(state, module) for state, module in zip(states, draft.inputs.norms, strict=True)]
    joined = torch.cat(states)
    if kind == "joint":
        joined = norm(joined, draft.inputs.joint_norm)
    torch.testing.assert_close(draft.project(aux)[0, 0], linear(draft.inputs.fc, joined))


def test_feedback_before_and_after_the_final_norm() -> None:
    state = torch.randn(16, dtype=torch.float64)
    raw, normed = make(FUSED), make(FUSED, feedback="post_norm")
    assert torch.equal(raw.feed_back(state), state)
    torch.testing.assert_close(normed.feed_back(state), norm(state, normed.norm))
    for draft in (raw, normed):
        torch.testing.assert_close(draft.logits(state), linear(draft.lm_head, norm(state, draft.norm)))


def test_a_wide_last_layer_is_narrowed_before_norm_head_and_feedback() -> None:
    draft = make({"fusion": "concat"} | WIDE)
    wide = run(draft, 0, draft.embed_tokens.weight[3], x := torch.randn(16, dtype=torch.float64))
    state = draft(torch.tensor([[3]]), x.view(1, 1, -1), torch.tensor([[5]]), UnrollMemory())
    torch.testing.assert_close(state[0, 0], linear(draft.narrow, wide))


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_a_norm_computes_in_its_weights_precision(given: torch.dtype, kept: torch.dtype) -> None:
    module = RmsNorm(16, eps=TOY.norm_eps).to(kept)
    x = torch.randn(3, 16).to(given)
    out = module(x)
    assert out.dtype == kept
    exact = torch.stack([norm(row, module) for row in x.to(kept)])
    torch.testing.assert_close(out, exact.to(kept))


def test_autocast_leaves_norms_in_full_precision() -> None:
    """Matrices multiply in bfloat16; each of the draft's norms takes what they make and answers in float32."""
    draft = make(FUSED | {"attention": {"qk_norm": True}}, inputs={"norm": "joint"}).float()
    dtypes = set()
    for module in draft.modules():
        if isinstance(module, nn.RMSNorm):
            module.register_forward_hook(lambda _module, _given, out: dtypes.add(out.dtype))
    aux = torch.randn(1, 3, 3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        u = draft.project(aux)
        state = draft(torch.tensor([[1, 2, 3]]), u, torch.arange(3)[None], UnrollMemory())
        draft.logits(state)
    assert u.dtype == torch.bfloat16
    assert dtypes == {torch.float32}
