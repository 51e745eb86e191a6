"""The router, the layout, and the way to rows and back, in one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ruda_async import TensorContractError, moe


def _logits(tokens: int, experts: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, experts, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_softmax_takes_the_most_probable() -> None:
    logits = _logits(20, 6)
    experts, weights = moe.route(logits, 2)
    probabilities = logits.softmax(-1)
    best = probabilities.topk(2)
    assert experts.equal(best.indices)
    torch.testing.assert_close(weights, best.values / best.values.sum(-1, keepdim=True))
    raw = moe.route(logits, 2, normalize=False, scale=2.5)
    torch.testing.assert_close(raw.weights, best.values * 2.5)


def test_among_equals_the_lower_expert_wins() -> None:
    assert moe.route(torch.zeros(3, 5), 3).experts.tolist() == [[0, 1, 2]] * 3
    routing = moe.route(torch.zeros(2, 8), 2, method="grouped_sigmoid", groups=4, top_groups=1)
    assert routing.experts.tolist() == [[0, 1]] * 2


def test_weights_of_half_precision_logits_are_float32() -> None:
    assert moe.route(torch.zeros(3, 5, dtype=torch.bfloat16), 2).weights.dtype == torch.float32
    assert moe.route(torch.zeros(3, 5, dtype=torch.float64), 2).weights.dtype == torch.float64


def test_grouped_sigmoid_by_hand() -> None:
    """Against the rule written out in plain Python."""
    logits, bias = _logits(50, 12, 1), torch.linspace(-0.5, 0.5, 12, dtype=torch.float64)
    experts, weights = moe.route(logits, 3, method="grouped_sigmoid", bias=bias, groups=4, top_groups=2)
    for token in range(50):
        score = logits[token].sigmoid().tolist()
        choice = [s + b for s, b in zip(score, bias.tolist(), strict=True)]
        value = [sum(sorted(choice[3 * g : 3 * g + 3])[-2:]) for g in range(4)]
        best = sorted(range(4), key=lambda g: -value[g])[:2]
        allowed = [e for e in range(12) if e // 3 in best]
        chosen = sorted(allowed, key=lambda e: -choice[e])[:3]
        assert experts[token].tolist() == chosen
        total = sum(score[e] for e in chosen)
        torch.testing.assert_close(weights[token].tolist(), [score[e] / total for e in chosen])


def test_the_bias_has_no_part_in_weights_or_gradients() -> None:
    logits = _logits(4, 6).requires_grad_()
    bias = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    moe.route(logits, 2, method="grouped_sigmoid", bias=bias).weights[:, 0].sum().backward()
    assert bias.grad is None
    assert logits.grad is not None
    assert logits.grad.abs().sum() > 0


def test_vanishing_scores_give_no_nan() -> None:
    weights = moe.route(torch.full((2, 4), -200.0), 2, method="grouped_sigmoid").weights
    assert weights.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"k": 7}, "k=7 experts per token of 6"),
        ({"k": 0}, "k=0"),
        ({"k": True}, "k=True"),
        ({"k": 2, "method": "hash"}, "'hash' is not known"),
        ({"k": 2, "groups": 2}, "grouped_sigmoid"),
        ({"k": 2, "method": "grouped_sigmoid", "groups": 4}, "does not divide 6"),
        ({"k": 3, "method": "grouped_sigmoid", "groups": 3, "top_groups": 1}, "from 2 to 3"),
        ({"k": 3, "method": "grouped_sigmoid", "groups": 3, "top_groups": 4}, "top_groups=4"),
        ({"k": 2, "method": "grouped_sigmoid", "bias": torch.zeros(5)}, r"shape \[5\]"),
    ],
)
def test_refusals(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(TensorContractError, match=text):
        moe.route(torch.zeros(4, 6), **arguments)  # type: ignore[arg-type]


def test_logits_are_checked() -> None:
    for logits in (torch.zeros(6), torch.zeros(2, 6, dtype=torch.int64)):
        with pytest.raises(TensorContractError, match="logits are floating"):
            moe.route(logits, 1)


# ---------------------------------------------------------------------- layouts


def test_layouts() -> None:
    layout = moe.ExpertLayout([0, 3, 3, 5])
    assert layout.counts == (3, 0, 2)
    assert (layout.experts, layout.world_size) == (5, 3)
    assert list(layout.local(2)) == [3, 4]
    assert list(layout.local(1)) == []
    assert moe.ExpertLayout.even(7, 3).counts == (3, 2, 2)
    assert moe.ExpertLayout.even(1, 3).counts == (1, 0, 0)
    assert moe.ExpertLayout.of_counts([3, 0, 2]) == layout
    assert hash(moe.ExpertLayout.of_counts([3, 0, 2])) == hash(layout)


@pytest.mark.parametrize("prefix", [[], [0], [1, 2], [0, 2, 1], [0, 0], [0, 2.0], [0, True]])
def test_bad_layouts(prefix: list[int]) -> None:
    with pytest.raises(TensorContractError, match=r"\[0, 3, 5\]"):
        moe.ExpertLayout(prefix)


# ---------------------------------------------------------------------- dispatch and combine


@given(
    tokens=st.integers(0, 12),
    counts=st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(lambda counts: sum(counts) > 0),
    data=st.data(),
)
def test_dispatch_keeps_every_assignment(tokens: int, counts: list[int], data: st.DataObject) -> None:
    layout = moe.ExpertLayout.of_counts(counts)
    k = data.draw(st.integers(1, layout.experts))
    logits = _logits(tokens, layout.experts, data.draw(st.integers(0, 99)))
    values = torch.arange(float(tokens)).view(tokens, 1)
    routing = moe.route(logits, k)
    dispatched = moe.dispatch(values, routing, layout)
    assert len(dispatched.rows) == tokens * k
    assert sum(dispatched.send_counts) == sum(dispatched.expert_counts) == tokens * k
    expected = [
        float(token)
        for expert in range(layout.experts)
        for token in range(tokens)
        if expert in routing.experts[token].tolist()
    ]
    assert dispatched.rows[:, 0].tolist() == expected
    by_rank = [0] * layout.world_size
    for expert in routing.experts.reshape(-1).tolist():
        by_rank[next(r for r in range(layout.world_size) if expert in layout.local(r))] += 1
    assert list(dispatched.send_counts) == by_rank
    # Experts that do nothing give the tokens back, since the weights of a token sum to 1.
    torch.testing.assert_close(moe.combine(dispatched.rows, dispatched), values)


def test_combine_adds_in_float32_by_ascending_expert() -> None:
    """Terms whose sum depends on the order, in half precision that could not hold it."""
    layout = moe.ExpertLayout([0, 3])
    routing = moe.Routing(torch.tensor([[2, 0, 1]]), torch.tensor([[1.0, 1.0, 1.0]]))
    dispatched = moe.dispatch(torch.zeros(1, 1, dtype=torch.float16), routing, layout)
    rows = torch.tensor([[30000.0], [30000.0], [-30000.0]], dtype=torch.float16)
    assert moe.combine(rows, dispatched).tolist() == [[30000.0]]  # 60000 + 30000 would overflow float16
    big = torch.tensor([[1e8], [-1e8], [1.0]])  # (1e8 - 1e8) + 1; another order loses the 1
    assert moe.combine(big, dispatched).tolist() == [[1.0]]


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (64,), (0,), (129,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [1, 3])
def test_combine_without_gradients_is_the_same_sum(
    shape: tuple[int, ...], dtype: torch.dtype, k: int
) -> None:
    """By a fused kernel where torch has one, also of rows that do not lie one after the other."""
    logits = _logits(7, 4, 3).double() if dtype == torch.float64 else _logits(7, 4, 3)
    layout = moe.ExpertLayout([0, 4])
    for tokens in (7, 0):
        dispatched = moe.dispatch(torch.zeros(tokens, 1), moe.route(logits[:tokens], k), layout)
        wide = torch.randn(tokens * k, *shape, 2, generator=torch.Generator().manual_seed(1)).to(dtype)
        for rows in (wide[..., 0], wide[..., 0].contiguous()):
            with_graph = moe.combine(rows, dispatched)
            with torch.no_grad():
                without = moe.combine(rows, dispatched)
            torch.testing.assert_close(without, with_graph)
            assert without.shape == (tokens, *shape)
    # The order of additions is the same too.
    big = torch.tensor([1e8, -1e8, 1.0])
    three = moe.Routing(torch.tensor([[2, 0, 1]]), torch.ones(1, 3))
    with torch.no_grad():
        assert moe.combine(big, moe.dispatch(torch.zeros(1, 1), three, layout)).tolist() == [1.0]


def test_dispatch_refuses_what_does_not_fit() -> None:
    layout = moe.ExpertLayout([0, 2])
    routing = moe.Routing(torch.tensor([[0], [2]]), torch.ones(2, 1))
    with pytest.raises(TensorContractError, match="names expert 2"):
        moe.dispatch(torch.zeros(2, 1), routing, layout)
    with pytest.raises(TensorContractError, match="does not fit"):
        moe.dispatch(torch.zeros(3, 1), routing, layout)
    with pytest.raises(TensorContractError, match="integers"):
        moe.dispatch(torch.zeros(2, 1), moe.Routing(torch.zeros(2, 1), torch.ones(2, 1)), layout)
    fine = moe.dispatch(torch.zeros(2, 1), moe.Routing(torch.tensor([[0], [1]]), torch.ones(2, 1)), layout)
    with pytest.raises(TensorContractError, match="one row for each of 2"):
        moe.combine(torch.zeros(3, 1), fine)
    with pytest.raises(TensorContractError, match="owns 2"):
        moe.per_expert([torch.nn.Identity()])(torch.zeros(2, 1), (1, 1))
    with pytest.raises(TensorContractError, match="1 experts do not fit"):
        moe.reference(torch.zeros(2, 1), torch.zeros(2, 2), [torch.nn.Identity()], 1)
