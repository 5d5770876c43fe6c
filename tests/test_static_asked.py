"""Values of the batch that a step reads (``ask=True``): asked again before each replay, of the whole batch where it is cut."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecard as oc
from onecard.errors import RecordingError
from onecard.testing import run_ranks

CLOSE = 1e-5
ROWS = 8


class Net(nn.Module):
    """Goes another way where ``asks`` says so of its input, of what it has made of it, or of itself."""

    def __init__(self, asks: str = "") -> None:
        super().__init__()
        self.asks = asks
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("limit", torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        if self.asks == "argument" and (x[:, 0] > 0).any():
            x = x * 1.5
        if self.asks == "buffer" and x.max() > self.limit:
            x = x * 1.5
        h = torch.tanh(self.a(x))
        if self.asks == "hidden" and h[:, 0].mean() > 0:
            h = h * 2
        return self.b(h)


def step_of(net: nn.Module, asks: str) -> Callable[..., Tensor]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def step(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        losses = F.cross_entropy(net(x), y, reduction="none")
        if asks == "count":
            loss = (losses * mask).sum() / mask.sum().item()
        elif asks == "mask" and mask.all():
            loss = losses.mean()
        else:
            loss = (losses * mask).mean()
        loss.backward()
        if asks == "gradient" and net.a.weight.grad.norm() > 0.1:  # type: ignore[union-attr, operator]
            loss = loss * 2
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def batches(count: int = 8) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Answers change from batch to batch, and differ between the halves of one."""
    draws, made = torch.Generator().manual_seed(3), []
    for i in range(count):
        x = torch.randn(ROWS, 6, generator=draws)
        y = torch.randint(4, (ROWS,), generator=draws)
        mask = (torch.rand(ROWS, generator=draws) > 0.3).float()
        if i % 2:
            mask[:] = 1
        elif i % 4 == 2:
            mask[: ROWS // 2], mask[-1] = 1, 0  # the first half would answer otherwise
        if i in (3, 4):
            x[:, 0] = -x[:, 0].abs()
        if i in (5, 6):
            x[: ROWS // 2, 0] = -x[: ROWS // 2, 0].abs()
            x[-1, 0] = 3.0
        made.append((x, y, mask))
    return made


def losses(
    asks: str, make: Callable[[Callable[..., Tensor]], Callable[..., Tensor]] = lambda step: step
) -> list[float]:
    torch.manual_seed(0)
    run = make(step_of(Net(asks), asks))
    return [float(run(*batch)) for batch in batches()]


def close(found: list[float], asks: str) -> None:
    assert found == pytest.approx(losses(asks), rel=CLOSE)


ASKED = ("argument", "buffer", "hidden", "count", "mask")


@pytest.mark.proof
@pytest.mark.parametrize("asks", ASKED)
@pytest.mark.filterwarnings("ignore:step is recorded anew")
def test_microbatches_go_the_way_of_the_whole_batch(asks):
    kept: list[Any] = []

    def make(step: Any) -> Any:
        kept.append(oc.to_static(step, k_steps=2, ask=True))
        return kept[0]

    close(losses(asks, make), asks)
    (run,) = kept
    assert len(run.recordings) > 1, "it has gone both ways"


class Halves(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(Halves, self).forward(part) for part in x.chunk(2)])


def test_the_batches_tell_halves_from_wholes():
    """The control: where each half goes its own way the losses are others."""
    torch.manual_seed(0)
    step = step_of(Halves("argument"), "argument")
    assert [float(step(*batch)) for batch in batches()] != pytest.approx(losses("argument"), rel=CLOSE)


@pytest.mark.filterwarnings("ignore:step is recorded anew")
def test_no_batch_is_kept():
    run, seen = oc.to_static(step_of(Net("argument"), "argument"), k_steps=2, ask=True), []
    for batch in batches(3):
        run(*batch)
        seen.append(weakref.ref(batch[0]))
    del batch
    gc.collect()
    assert [x() for x in seen] == [None] * 3


def test_what_is_known_after_backward_alone_is_refused():
    run = oc.to_static(step_of(Net(), "gradient"), k_steps=2, ask=True)
    batch = batches(1)[0]
    run(*batch)
    with pytest.raises(RecordingError, match=r"this one is known after backward\(\)"):
        run(*batch)


def test_without_ask_it_is_refused_with_the_call_that_works():
    run = oc.to_static(step_of(Net(), "mask"), k_steps=2)
    batch = batches(1)[0]
    run(*batch)
    with pytest.raises(RecordingError, match="ask=True"):
        run(*batch)


def test_a_loop_over_microbatches_is_told_that_the_whole_batch_is_asked():
    run = oc.to_static(step_of(Net("argument"), "argument"), k_steps=2, avg=True, ask=True)
    batch = batches(1)[0]
    run(*batch)
    with pytest.warns(UserWarning, match="avg=True means a loop over microbatches, and .* asks for values"):
        run(*batch)


class Chance(nn.Module):
    """Asks a microbatch something else than a whole batch; ``more``: which it asks nothing."""

    def __init__(self, more: bool) -> None:
        super().__init__()
        self.a, self.more = nn.Linear(6, 4), more

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < ROWS and x.sum() > 0:
            x = x * 2
        if len(x) == ROWS and not self.more and x.mean() > 9:
            x = x * 3
        return self.a(x)


@pytest.mark.parametrize("more", [True, False])
def test_other_questions_of_a_microbatch_are_refused(more):
    run = oc.to_static(step_of(Chance(more), ""), k_steps=2, ask=True)
    batch = batches(1)[0]
    run(*batch)
    instead = "nothing more" if more else "at .*test_static_asked.py:[0-9]+"
    with pytest.raises(RecordingError, match=f"of the whole batch the step asks {instead} in its place"):
        run(*batch)


@pytest.mark.filterwarnings("ignore:step is recorded anew")
def test_what_was_written_through_a_view_is_asked_for():
    """``_needed`` follows memory, whichever view of it was written to."""
    seen = torch.zeros(2)

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            seen[0] += x.sum()
        return x * 2 if seen.sum() > 3 else x

    run = oc.to_static(step, ask=True)
    with torch.no_grad():
        found = [float(run(torch.ones(1))) for _ in range(6)]
    assert found == [1, 1, 1, 2, 2, 2]


# -- on ranks ----------------------------------------------------------------------------------------------------------------


def under(plan: dict[str, int], kinds: tuple[str, ...]) -> list[list[float]]:
    def make(step: Any) -> Any:
        return oc.to_static(step, plan=oc.Plan(**plan), ask=True)  # type: ignore[arg-type]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "step is recorded anew|.*have no parameter")
        return [losses(asks, make) for asks in kinds]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("plan", "kinds"),
    [
        ({"dp": 2}, ("argument", "count", "mask")),
        ({"dp": 2, "microbatches": 2}, ("argument", "hidden", "mask")),
        ({"pp": 2, "microbatches": 2}, ("argument", "count", "mask")),
    ],
)
def test_plans_go_the_way_of_the_whole_batch(plan, kinds):
    """Each rank has a part of the batch: what it says of that alone is no answer."""
    for found in run_ranks(under, 2, plan, kinds):
        for asks, each in zip(kinds, found, strict=True):
            close(each, asks)


def asks_parameters() -> str:
    run = oc.to_static(step_of(Net("hidden"), "hidden"), plan=oc.Plan(pp=2, microbatches=2), ask=True)
    try:
        run(*batches(1)[0])
    except RecordingError as why:
        return str(why)
    return ""


def test_a_pipeline_is_asked_of_arguments_alone():
    for said in run_ranks(asks_parameters, 2):
        assert "needs parameters or states, of which each stage has its own" in said


def padded(plan: dict[str, int] | None) -> list[float]:
    """Three losses of a model of transformers, whose library asks whether a mask leaves all."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=1, max_position_embeddings=16, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(ids: Tensor, mask: Tensor) -> Tensor:
        labels = ids.masked_fill(mask == 0, -100)
        loss = model(input_ids=ids, labels=labels, attention_mask=mask).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run: Any = step if plan is None else oc.to_static(step, plan=oc.Plan(**plan))  # type: ignore[arg-type]
    draws, found = torch.Generator().manual_seed(1), []
    for i in range(4):
        ids, mask = torch.randint(32, (8, 6), generator=draws), torch.ones(8, 6, dtype=torch.int64)
        mask[:: 3 if i % 2 else 1, 4:] = 0
        found.append(float(run(ids, mask)))
    return found


def padded_under(plans: list[dict[str, int]]) -> list[list[float]]:
    return [padded(plan) for plan in plans]


@pytest.mark.proof
def test_a_library_that_asks_whether_its_mask_leaves_all():
    pytest.importorskip("transformers", reason="pip install onecard[test]")
    expected = padded(None)
    for each in run_ranks(padded_under, 2, [{"dp": 2, "microbatches": 2}, {"pp": 2, "microbatches": 4}]):
        for found in each:
            assert found == pytest.approx(expected, rel=CLOSE)
