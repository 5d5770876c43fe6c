"""Names that users of other libraries look for: there, and right, or answered with what takes their place."""

from __future__ import annotations

import pytest
import torch
from fleet_programs import begin, close
from torch import nn

import onecard as oc
from onecard import fleet
from onecard.errors import CommunicationError
from onecard.fleet.front.exchanges import P2POp
from onecard.testing import run_ranks


def exchanged(backend: str) -> None:
    assert oc.get_backend() == backend and oc.is_initialized()
    me, size = oc.get_rank(), oc.get_world_size()
    values = [{"step": 3 + me}, f"rank {me}"]
    oc.broadcast_object_list(values, src=1)
    assert values == [{"step": 4}, "rank 1"]
    mine: list[object] = []
    oc.scatter_object_list(mine, [10 * i for i in range(size)] if me == 1 else None, src=1)
    assert mine == [10 * me]
    with pytest.raises(CommunicationError, match="one value for each of 2 ranks, and rank 0 gives 1"):
        oc.scatter_object_list(mine, [1], src=0)
    # Rank r sends r + 1 rows to rank 0, and 2 to rank 1.
    x = torch.arange(2.0 * (me + 3)).view(-1, 2) + 100 * me
    given = [torch.arange(2.0 * (r + 3)).view(-1, 2) + 100 * r for r in range(size)]
    out = torch.zeros(3 if me == 0 else 4, 2)
    oc.alltoall_single(out, x, [me + 1, 2], [1, 2] if me == 0 else [2, 2]).wait()
    close(out, torch.cat([g[: r + 1] if me == 0 else g[r + 1 :] for r, g in enumerate(given)]))
    even = torch.zeros(4)
    oc.alltoall_single(even, torch.arange(4.0) + 10 * me)
    close(even, torch.tensor([0.0, 1, 10, 11]) + 2 * me)
    with pytest.raises(CommunicationError, match=r"in_tensor \[3\] is not equal parts.*give in_split_sizes"):
        oc.alltoall_single(torch.zeros(4), torch.zeros(3))
    got = torch.zeros(3)
    operations = [P2POp(oc.isend, torch.full((3,), 1.0 + me), 1 - me), oc.P2POp(oc.irecv, got, 1 - me)]
    for work in oc.batch_isend_irecv(operations):
        work.wait()
    close(got, torch.full((3,), 2.0 - me))
    with pytest.raises(CommunicationError, match="is oc"):
        oc.P2POp(oc.send, got, 1 - me)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_collectives_of_other_libraries(backend: str) -> None:
    run_ranks(exchanged, 2, backend, backend=backend)


def megatrons() -> None:
    """A linear layer by columns and one by rows, with Megatron's four functions and no group."""
    begin(mp=2)
    me, m = oc.get_rank(), fleet.mappings
    generator = torch.Generator().manual_seed(0)
    x, a, b = (torch.randn(shape, generator=generator) for shape in ((3, 4), (6, 4), (4, 6)))
    one = [t.clone().requires_grad_() for t in (x, a, b)]
    expected = torch.relu(one[0] @ one[1].t()) @ one[2].t()
    expected.square().sum().backward()
    mine = [t.clone().requires_grad_() for t in (x, a.chunk(2)[me], b.chunk(2, 1)[me])]
    y = m.reduce_from(torch.relu(m.copy_to(mine[0]) @ mine[1].t()) @ mine[2].t())
    m.gather_from(m.scatter_to(y)).square().sum().backward()
    close(y.detach(), expected.detach())
    wanted = (one[0].grad, one[1].grad.chunk(2)[me], one[2].grad.chunk(2, 1)[me])  # type: ignore[union-attr]
    for t, right in zip(mine, wanted, strict=True):
        close(t.grad, right)  # type: ignore[arg-type]


def test_megatrons_functions_without_a_group() -> None:
    run_ranks(megatrons, 2)


def test_recompute_in_segments() -> None:
    """One card's gradients, with dropout; what lies within a segment is not kept."""
    utils = fleet.utils
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Tanh()) for _ in range(5)))
    x, kept, expected = torch.randn(3, 4), dict[int, int](), list[torch.Tensor]()
    for segments in (0, 1, 2, 5, 9):
        torch.manual_seed(1)
        layers.zero_grad()
        given, count = x.clone().requires_grad_(), [0]
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, count=count: (count.__setitem__(0, count[0] + 1), t)[1], lambda t: t
        ):
            made = utils.recompute_sequential({"segments": segments}, layers, given) if segments else layers(given)
        kept[segments] = count[0]
        made.sum().backward()
        found = [made.detach(), given.grad, *(p.grad.clone() for p in layers.parameters())]
        expected = expected or found
        for one, other in zip(found, expected, strict=True):
            close(one, other, f"{segments} segments")
    # Outside of a segment nothing is kept but its argument, which torch 2.11 keeps where hooks see it.
    assert all(kept[segments] in (0, min(segments, 5)) for segments in (1, 2, 5, 9)) and kept[0] > 5, kept
    close(utils.recompute_hybrid({"mp_group": None}, torch.sin, x), x.sin())
    with pytest.raises(fleet.FleetError, match="is not moved off the device"):
        utils.recompute_hybrid({"offload": True}, torch.sin, x)
    with pytest.raises(fleet.FleetError, match="ctx has no 'segment'; it may have segments"):
        utils.recompute_sequential({"segment": 2}, layers, x)


PADDLES = [
    "PipelineParallelWithInterleave", "SegmentParallel", "hybrid_parallel_util", "mix_precision_utils", "timer_helper",
    "fused_allreduce_gradients", "recompute_sequential", "recompute_hybrid", "copy_to_tensor_model_parallel_region",
    "scatter_to_sequence_parallel_region",
]  # fmt: skip
OTHERS = [
    "auto_wrap_policy", "ignored_params", "register_fsdp_forward_method", "GatheredParameters", "register_external_parameter",
    "copy_to_tensor_model_parallel_region", "gather_from_tensor_model_parallel_region",
]  # fmt: skip


def test_what_is_not_there_says_what_is() -> None:
    for name in PADDLES:
        for module in (fleet, fleet.meta_parallel, fleet.utils):
            if not hasattr(module, name):
                with pytest.raises(AttributeError, match=rf"has no '{name}'. In its place: "):
                    getattr(module, name)
    for name in OTHERS:
        with pytest.raises(AttributeError, match=rf"onecard has no '{name}' \(.*\). In its place: "):
            getattr(oc, name)
    for key in ("sharding_configs", "mp_configs", "pp_configs"):
        with pytest.raises(fleet.FleetError, match=rf"\['{key}'\]: in its place: "):
            fleet.DistributedStrategy().hybrid_configs = {key: 2}
