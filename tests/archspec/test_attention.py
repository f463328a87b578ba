"""Who sees whom, rotary positions, grouped heads: each against something written down independently."""

import math

import pytest
import torch
from torch import Tensor, nn

from archspec.attention import Attention, ChainCache, Memory, Rotary, UnrollMemory, rotate

T = 4


def heads(steps: int, rows: int = T, kv_heads: int = 1, size: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v of every step, [S, 1, H, T, D]; two query heads for each key head."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(steps, 1, 2 * kv_heads, rows, size, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, steps, 1, kv_heads, rows, size, generator=generator, dtype=torch.float64)
    return q, k, v


def visibility(steps: int, window: int | None, allowed: Tensor | None = None) -> list[list[str]]:
    """For every step, one string per row: 1 where the row's output depends on a key, in the order (step, row)."""
    q, k, v = heads(steps)
    v.requires_grad_()
    memory = UnrollMemory(allowed)
    rows = []
    for step in range(steps):
        out = memory.attend(0, q[step], k[step], v[step], window)
        rows.append([_seen(out[0, :, row], v, step) for row in range(T)])
        memory.next_step()
    return rows


def _seen(output: Tensor, v: Tensor, step: int) -> str:
    (gradient,) = torch.autograd.grad(output.sum(), v, retain_graph=True)
    seen = gradient[: step + 1, 0, 0].abs().sum(-1) > 0
    return " ".join("".join(str(int(x)) for x in keys) for keys in seen)


# Each row reads: which rows' keys of step 0, which of step 1, and so on.


def test_training_visibility() -> None:
    assert visibility(3, window=None) == [
        ["1000", "1100", "1110", "1111"],
        ["1000 1000", "1100 0100", "1110 0010", "1111 0001"],
        ["1000 1000 1000", "1100 0100 0100", "1110 0010 0010", "1111 0001 0001"],
    ]


def test_training_visibility_in_a_window_of_two() -> None:
    """Row t at step s stands at position t + s and sees that position and the one before."""
    assert visibility(4, window=2) == [
        ["1000", "1100", "0110", "0011"],
        ["1000 1000", "0100 0100", "0010 0010", "0001 0001"],
        ["0000 1000 1000", "0000 0100 0100", "0000 0010 0010", "0000 0001 0001"],
        ["0000 0000 1000 1000", "0000 0000 0100 0100", "0000 0000 0010 0010", "0000 0000 0001 0001"],
    ]


def test_training_visibility_in_a_window_of_three() -> None:
    assert visibility(3, window=3) == [
        ["1000", "1100", "1110", "0111"],
        ["1000 1000", "1100 0100", "0110 0010", "0011 0001"],
        ["1000 1000 1000", "0100 0100 0100", "0010 0010 0010", "0001 0001 0001"],
    ]


def test_training_visibility_of_two_documents() -> None:
    documents = torch.tensor([0, 0, 1, 1])
    allowed = (documents[:, None] == documents)[None]
    assert visibility(2, window=None, allowed=allowed) == [
        ["1000", "1100", "0010", "0011"],
        ["1000 1000", "1100 0100", "0010 0010", "0011 0001"],
    ]
    assert visibility(2, window=2, allowed=allowed) == [
        ["1000", "1100", "0010", "0011"],
        ["1000 1000", "0100 0100", "0010 0010", "0001 0001"],
    ]


@pytest.mark.parametrize(
    ("window", "expected"), [(None, ["11100", "11110", "11111"]), (2, ["01100", "00110", "00011"])]
)
def test_decoding_visibility(window: int | None, expected: list[str]) -> None:
    """Two rows kept, three new ones in one call."""
    q, k, v = heads(1, rows=5)
    v.requires_grad_()
    cache = ChainCache()
    cache.attend(0, q[0, :, :, :2], k[0, :, :, :2], v[0, :, :, :2], window)
    out = cache.attend(0, q[0, :, :, 2:], k[0, :, :, 2:], v[0, :, :, 2:], window)
    assert [_seen(out[0, :, row], v, 0) for row in range(3)] == expected
    assert len(cache) == 5


def test_truncate_forgets_the_last_rows_of_every_layer() -> None:
    q, k, v = heads(1, rows=5)
    cache, fresh = ChainCache(), ChainCache()
    for layer in (0, 1):
        cache.attend(layer, q[0], k[0], v[0], None)
        fresh.attend(layer, q[0, :, :, :3], k[0, :, :, :3], v[0, :, :, :3], None)
    cache.truncate(3)
    assert len(cache) == len(fresh) == 3
    for layer in (0, 1):
        new = (q[0, :, :, 4:], k[0, :, :, 4:], v[0, :, :, 4:])
        assert torch.equal(cache.attend(layer, *new, None), fresh.attend(layer, *new, None))
    assert len(ChainCache()) == 0


def written_out(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, seen: Tensor) -> Tensor:
    """Softmax attention by its formula, keys repeated for the query heads that share them."""
    group = q_BHTD.shape[1] // k_BKTD.shape[1]
    k, v = k_BKTD.repeat_interleave(group, 1), v_BKTD.repeat_interleave(group, 1)
    scores = torch.einsum("bhid,bhjd->bhij", q_BHTD, k) / math.sqrt(q_BHTD.shape[-1])
    return torch.einsum("bhij,bhjd->bhid", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("window", [None, 3])
def test_training_attention_is_softmax_attention(kv_heads: int, window: int | None) -> None:
    """All keys of all steps side by side under one mask give the same as the memory, step by step."""
    steps = 5
    q, k, v = heads(steps, kv_heads=kv_heads)
    memory = UnrollMemory()
    rows = torch.arange(T)
    for step in range(steps):
        first = rows[:, None] >= rows
        own = [(rows[:, None] == rows) & (window is None or step - s < window) for s in range(1, step + 1)]
        if window is not None:
            first = first & (rows[:, None] - rows + step < window)
        keys, values = (torch.cat(list(x[: step + 1]), dim=2) for x in (k, v))
        expected = written_out(q[step], keys, values, torch.cat((first, *own), dim=-1))
        out = memory.attend(0, q[step], k[step], v[step], window)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        memory.next_step()


def test_decoding_attention_is_softmax_attention() -> None:
    q, k, v = heads(1, rows=6, kv_heads=2)
    expected = written_out(q[0], k[0], v[0], torch.ones(6, 6, dtype=torch.bool).tril())
    cache = ChainCache()
    pairs = [slice(i, i + 2) for i in (0, 2, 4)]
    parts = [cache.attend(0, q[0, :, :, rows], k[0, :, :, rows], v[0, :, :, rows], None) for rows in pairs]
    torch.testing.assert_close(torch.cat(parts, dim=2), expected, rtol=1e-12, atol=1e-12)


def test_layers_do_not_share_keys() -> None:
    q, k, v = heads(2)
    for together, alone in ((UnrollMemory(), UnrollMemory()), (ChainCache(), ChainCache())):
        memories: tuple[Memory, Memory] = (together, alone)
        together.attend(0, q[0], k[0], v[0], None)
        assert torch.equal(*(memory.attend(1, q[1], k[1], v[1], None) for memory in memories))


def test_windows_of_two_layers_keep_their_own_masks() -> None:
    q, k, v = heads(2)
    both, wide, narrow = UnrollMemory(), UnrollMemory(), UnrollMemory()
    for step in range(2):
        now = (q[step], k[step], v[step])
        assert torch.equal(both.attend(0, *now, 3), wide.attend(0, *now, 3))
        assert torch.equal(both.attend(1, *now, 2), narrow.attend(1, *now, 2))
        for memory in (both, wide, narrow):
            memory.next_step()


# Rotary positions.


def test_rotary_turns_pairs_like_complex_numbers() -> None:
    """Element i and i + D/2 are one complex number, turned by position * theta^(-2i/D)."""
    size, theta, position = 6, 100.0, 7
    x = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned = rotate(x.view(1, 1, 1, size), *Rotary(size, theta)(torch.tensor([[position]]))).flatten()
    for i in range(size // 2):
        angle = position * theta ** (-2 * i / size)
        number = complex(x[i], x[i + size // 2]) * complex(math.cos(angle), math.sin(angle))
        assert turned[i].item() == pytest.approx(number.real, abs=1e-6)
        assert turned[i + size // 2].item() == pytest.approx(number.imag, abs=1e-6)


def test_rotary_leaves_lengths_and_depends_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    rotary = Rotary(8, 10_000.0)

    def score(at_q: int, at_k: int) -> float:
        return float((rotate(q, *rotary(torch.tensor([[at_q]]))) * rotate(k, *rotary(torch.tensor([[at_k]])))).sum())

    assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-4)
    assert abs(score(5, 2) - score(5, 3)) > 1e-3
    assert rotate(q, *rotary(torch.tensor([[90]]))).norm() == pytest.approx(q.norm())


def test_angles_stay_fp32_in_a_bf16_draft() -> None:
    """At position 3,000 a frequency rounded to bf16 would be off by radians; nor is any table cast along."""
    rotary, positions = Rotary(64, 10_000.0), torch.tensor([[3000]])
    expected = rotary(positions)
    for cast in (rotary.to(torch.bfloat16), nn.ModuleList([rotary]).half()[0]):
        for got, want in zip(cast(positions), expected, strict=True):
            assert got.dtype == torch.float32
            assert torch.equal(got, want)
    x = torch.ones(1, 1, 1, 64, dtype=torch.bfloat16)
    assert rotate(x, *expected).dtype == torch.bfloat16


# The layer's attention as a whole.


@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_is_its_formula(qk_norm: bool) -> None:
    """Projections with bias, norm of every head before the rotation, grouped keys, output projection with bias."""
    torch.manual_seed(0)
    size, count, kv_heads = 4, 6, 2
    norms = [nn.RMSNorm(size, eps=1e-5) if qk_norm else nn.Identity() for _ in range(2)]
    attention = Attention(
        0,
        10,
        8,
        heads=count,
        kv_heads=kv_heads,
        head_dim=size,
        bias=True,
        window=None,
        q_norm=norms[0],
        k_norm=norms[1],
    )
    for norm in norms:
        for weight in norm.parameters():
            nn.init.normal_(weight)
    x = torch.randn(2, T, 10)
    rotary = Rotary(size, 10_000.0)(torch.arange(T)[None])

    def split(projection: nn.Linear) -> Tensor:
        return (x @ projection.weight.T + projection.bias).view(2, T, -1, size).transpose(1, 2)

    def normed(value: Tensor, norm: nn.Module) -> Tensor:
        if not isinstance(norm, nn.RMSNorm):
            return value
        return value / (value.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight

    q, k = (
        rotate(normed(split(projection), norm), *rotary)
        for projection, norm in ((attention.q_proj, norms[0]), (attention.k_proj, norms[1]))
    )
    mixed = written_out(q, k, split(attention.v_proj), torch.ones(T, T, dtype=torch.bool).tril())
    expected = mixed.transpose(1, 2).reshape(2, T, -1) @ attention.o_proj.weight.T + attention.o_proj.bias
    torch.testing.assert_close(attention(x, rotary, UnrollMemory()), expected, rtol=1e-5, atol=1e-5)
