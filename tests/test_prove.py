"""prove: all ranks in one process beside one card; right programs are equal, planted faults are found where they are."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launching import python
from torch import nn
from torch.nn import functional as F

import onecard as oc
from onecard import fleet
from onecard.comm.joined.worlds import together
from onecard.errors import CommunicationError, ProofError
from onecard.proof.explain import explained
from onecard.proof.script import Script

EXAMPLES = Path(__file__).parents[1] / "examples" / "seeds"


# -- all ranks of a world in one process -------------------------------------------------------------------------------------


def collectives(rank):
    n = dist.get_world_size()
    x = torch.arange(n, dtype=torch.float32) + 10 * rank
    summed, most = x.clone(), x.clone()
    dist.all_reduce(summed)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    parts = [torch.empty(n) for _ in range(n)]
    dist.all_gather(parts, x)
    joined = torch.empty(n * n)
    dist.all_gather_into_tensor(joined, x)
    own = torch.empty(1)
    dist.reduce_scatter_tensor(own, x)
    swapped = torch.empty(n)
    dist.all_to_all_single(swapped, x)
    told = x.clone()
    dist.broadcast(told, 1)
    words = [None] * n
    dist.all_gather_object(words, f"rank {rank}")
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(x, 0)
    later = dist.all_reduce(y := torch.ones(1), async_op=True)
    later.wait()
    return summed, most, torch.stack(parts), joined, own, swapped, told, words, x, y


@pytest.mark.filterwarnings("ignore::FutureWarning")  # names that torch 2.13 gives up
def test_messages_carry_values():
    n = 3
    want = torch.stack([torch.arange(n, dtype=torch.float32) + 10 * rank for rank in range(n)])
    for rank, (summed, most, parts, joined, own, swapped, told, words, x, y) in enumerate(together(n, collectives)):
        assert torch.equal(summed, want.sum(0)) and torch.equal(most, want[-1])
        assert torch.equal(parts, want) and torch.equal(joined, want.flatten())
        assert own == want.sum(0)[rank] and torch.equal(swapped, want[:, rank]) and torch.equal(told, want[1])
        assert words == ["rank 0", "rank 1", "rank 2"] and y == n
        assert torch.equal(x, want[0 if rank == 1 else rank])


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_rank_that_cannot_begin_or_go_on_is_an_error(after):
    """Not a wait without end; and what belongs to this process is as it was."""

    def around(rank):
        times = iter(range(100))

        @contextmanager
        def entered():
            if rank == 1 and next(times) == after:
                raise KeyError("no way in")
            yield

        return _Each(entered)

    before = dict(os.environ), torch.get_rng_state(), dist.is_initialized()
    with pytest.raises(KeyError, match="no way in") as fault:
        together(3, lambda rank: [dist.barrier() for _ in range(4)], around=around)
    assert fault.value.__notes__ == ["on rank 1 of 3"]
    assert dict(os.environ) == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert dist.is_initialized() == before[2]
    assert together(2, lambda rank: oc.get_rank()) == [0, 1]


class _Each:
    """A context that is another one each time that it is entered."""

    def __init__(self, make):
        self.make = make

    def __enter__(self):
        self.now = self.make()
        return self.now.__enter__()

    def __exit__(self, *fault):
        return self.now.__exit__(*fault)


def test_each_rank_has_its_own_random_numbers_and_world():
    def program(rank):
        torch.manual_seed(rank)
        first = torch.rand(1).item()
        dist.barrier()
        return first, torch.rand(1).item(), oc.get_rank(), oc.get_world_size()

    found = together(2, program)
    for rank in range(2):
        generator = torch.Generator().manual_seed(rank)
        assert found[rank] == (
            torch.rand(1, generator=generator).item(),
            torch.rand(1, generator=generator).item(),
            rank,
            2,
        )
    assert not dist.is_initialized() and oc.get_world_size() == 1


def test_ranks_that_wait_in_a_circle_are_told_at_once():
    def program(rank):
        if rank == 0:
            dist.recv(torch.empty(1), 1)
        elif rank == 1:
            dist.recv(torch.empty(1), 0)

    with pytest.raises(
        CommunicationError, match=r"rank 0 waits for recv.*from rank 1.*rank 1 waits for recv.*from rank 0"
    ):
        together(2, program)


def test_a_rank_that_leaves_early_is_named():
    with pytest.raises(CommunicationError, match="rank 0 has ended; rank 1 waits for barrier"):
        together(2, lambda rank: rank and dist.barrier())


def test_other_collectives_on_other_ranks_are_refused():
    def program(rank):
        x = torch.ones(2)
        dist.broadcast(x, 0) if rank else dist.all_reduce(x)

    with pytest.raises(CommunicationError, match=r"different collectives: rank 0 all_reduce.* rank 1 broadcast"):
        together(2, program)


def test_the_first_fault_is_raised_with_its_rank():
    def program(rank):
        if rank == 1:
            raise ValueError("mine")
        dist.barrier()

    with pytest.raises(ValueError, match="mine") as found:
        together(3, program)
    assert found.value.__notes__ == ["on rank 1 of 3"]


# -- right programs ----------------------------------------------------------------------------------------------------------


def marked(zero=0, dropout=0.1):
    """A transformer on dp x tp."""
    torch.manual_seed(0)
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=dropout)
    model = nn.Sequential(
        nn.Embedding(20, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 20)
    )
    for name, module in model.named_modules():
        if name.endswith(("linear1", "linear2")):
            dim = 0 if name.endswith("linear1") else 1
            module.weight = nn.Parameter(oc.shard_tensor(module.weight.data, mesh, [oc.Replicate(), oc.Shard(dim)]))
    oc.shard_layer(model, mesh)
    optimizer = oc.shard_optimizer(
        torch.optim.AdamW(model.parameters(), 1e-3), *([oc.ShardingStage1("dp", mesh)] if zero else [])
    )
    tokens = oc.shard_tensor(torch.randint(0, 20, (8, 6)), mesh, [oc.Shard(0), oc.Replicate()])
    losses = []
    for _ in range(2):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize("zero", [0, 1])
def test_a_marked_program_is_one_cards(zero):
    proof = oc.prove(marked, zero, world=4)
    assert proof and proof.exact, str(proof)
    assert proof.share >= 0.98 and proof.values > 300
    assert proof.rounding is not None and "Equal" in str(proof)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.share(4)
@pytest.mark.parametrize(
    "name",
    ["semi_auto_model_parallel_003", "semi_auto_pipeline_parallel_003", "semi_auto_group_sharded_003",
     "semi_auto_data_parallel_003", "manual_model_parallel_003", "manual_data_parallel_003"],
)  # fmt: skip
def test_seeds_are_one_cards(name):
    proof = oc.prove(Script(EXAMPLES / f"{name}.py", ["--inner_size", "16", "--batch_num", "2"]), world=2, steps=2)
    assert proof and proof.exact, str(proof)
    assert len(proof.results) >= 20 and proof.share >= 0.98, proof.share


@pytest.mark.share(1)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_plans_values_have_partners(zero):
    proof = oc.prove(nn.Sequential(nn.Linear(8, 6), nn.Tanh()), torch.randn(4, 8), plan=oc.Plan(dp=2, zero=zero))
    assert proof and proof.share >= 0.98, proof.share


def by_stage(fault=""):
    """Ranks run one line on other layers, as stages do; the message between them is left out. ``fault``: of the last stage."""
    torch.manual_seed(0)
    weights, x = torch.randn(4, 3, 3), torch.randn(2, 3)
    n, rank = dist.get_world_size() if dist.is_initialized() else 1, dist.get_rank() if dist.is_initialized() else 0
    mine = weights.chunk(n)[rank]
    if fault == "other" and rank == n - 1:
        mine = weights.chunk(n)[0]
    made = [torch.tanh(x @ w) for w in mine]
    if fault == "wrong" and rank == n - 1:
        made[0] = made[0] * 2
    total = sum(each.sum() for each in made)
    if n > 1:
        dist.all_reduce(total)
    return total


@pytest.mark.proof
def test_stages_stand_for_values_of_their_own():
    proof = oc.prove(by_stage, world=2)
    assert proof and proof.share > 0.8, str(proof)
    for fault in ("other", "wrong"):
        proof = oc.prove(by_stage, fault, world=2)
        assert not proof and proof.first is not None and 1 in proof.first.ranks, str(proof)


@pytest.mark.proof
def test_what_the_library_tries_out_is_no_part_of_a_program():
    """An optimizer of fleet's is tried on tensors of a few numbers: in a second proof its hook came before the watch's."""
    script = Script(EXAMPLES / "manual_model_parallel_003.py", ["--inner_size", "16", "--batch_num", "2"])
    first, second = (oc.prove(script, world=2, steps=2, rounding=False) for _ in range(2))
    assert first and second, str(second)
    assert first.values == second.values and first.share == second.share > 0.97, (first.share, second.share)


# -- plain torch.distributed, and what is wrong with it ----------------------------------------------------------------------


def data_parallel(fault=""):
    torch.manual_seed(0)
    n, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, target = torch.randn(8, 6), torch.randint(3, (8,))
    for step in range(2):
        loss = F.cross_entropy(model(x.chunk(n)[rank]), target.chunk(n)[rank])
        loss.backward()
        for i, p in enumerate(model.parameters()):
            if fault == "missing" and i == 2:
                continue
            dist.all_reduce(p.grad)
            if fault == "twice" and i == 0:
                dist.all_reduce(p.grad)
            p.grad /= 1 if fault == "sum" else n
        if not (fault == "stale" and step == 0 and rank == 1):
            optimizer.step()
        optimizer.zero_grad()
    return loss


def plain():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, target = torch.randn(8, 6), torch.randint(3, (8,))
    for _ in range(2):
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


@pytest.mark.proof
def test_data_parallelism_by_hand_is_one_cards():
    proof = oc.prove(data_parallel, world=4, against=plain)
    assert proof, str(proof)
    assert oc.prove(data_parallel, world=2)  # in a world of one it is its own reference


@pytest.mark.share(1)
@pytest.mark.parametrize(
    ("fault", "what", "why"),
    [("missing", "the gradient of 2.weight in step 1", "mean is missing"),
     ("twice", "the gradient of 0.weight in step 1", "summed twice over ranks [0, 1]"),
     ("sum", "the gradient of 0.weight in step 1", "summed twice over ranks [0, 1], or a sum in place of a mean")],
)  # fmt: skip
def test_gradients_that_are_summed_wrongly_are_named(fault, what, why):
    proof = oc.prove(data_parallel, fault, world=2)
    assert not proof
    assert proof.wrong[0].what == what and proof.wrong[0].ranks == (0, 1)
    assert why in str(proof)


@pytest.mark.proof
def test_the_rank_with_old_parameters_is_named():
    proof = oc.prove(data_parallel, "stale", world=2)
    assert not proof and proof.first is not None
    assert 1 in proof.first.ranks


def tensor_parallel(fault=""):
    """Megatron's two layers and a loss that is parallel over the vocabulary."""
    torch.manual_seed(0)
    n, rank = dist.get_world_size(), dist.get_rank()
    first, second, x = torch.randn(8, 6), torch.randn(6, 8), torch.randn(4, 6)
    target = torch.randint(6, (4,))
    h = torch.tanh(x @ first.chunk(n)[rank].T)
    y = h @ second.chunk(n, 1)[rank].T
    if fault != "missing":
        dist.all_reduce(y)
    if fault == "twice":
        dist.all_reduce(y)
    y = y.exp()
    width = 6 // n
    start = rank * (width - (fault == "offset"))
    mine = y.narrow(1, start, width).contiguous()
    total = mine.sum(1)
    if fault != "total":
        dist.all_reduce(total)
    inside = (target >= start) & (target < start + width)
    picked = torch.where(inside, mine.gather(1, (target - start).clamp(0, width - 1)[:, None])[:, 0], 0.0)
    dist.all_reduce(picked)
    return (total.log() - picked.log()).mean()


def one_card_loss():
    torch.manual_seed(0)
    first, second, x = torch.randn(8, 6), torch.randn(6, 8), torch.randn(4, 6)
    target = torch.randint(6, (4,))
    y = (torch.tanh(x @ first.T) @ second.T).exp()
    return (y.sum(1).log() - y.gather(1, target[:, None])[:, 0].log()).mean()


def test_tensor_parallelism_by_hand_is_one_cards():
    assert oc.prove(tensor_parallel, world=2, against=one_card_loss)


@pytest.mark.parametrize(("fault", "operator"), [("missing", "exp"), ("twice", "all_reduce"), ("offset", "sum")])
def test_wrong_sums_and_offsets_are_found_at_the_operator(fault, operator):
    proof = oc.prove(partial(tensor_parallel, fault), world=2, against=one_card_loss)
    assert not proof
    assert proof.first is not None and proof.first.operator == operator, str(proof)
    assert "test_prove.py" in proof.first.line


def gathered_norm(fault=""):
    """The norm of gradients: a weight that two ranks have whole counts once."""
    torch.manual_seed(0)
    n, rank = dist.get_world_size(), dist.get_rank()
    tied, cut = torch.randn(4, 4), torch.randn(8, 4)
    squares = cut.chunk(n)[rank].square().sum() + (tied.square().sum() if rank == 0 or fault else 0.0)
    dist.all_reduce(squares)
    return squares.sqrt()


def test_a_tied_weight_that_counts_twice_in_a_norm_is_found():
    def one():
        torch.manual_seed(0)
        tied, cut = torch.randn(4, 4), torch.randn(8, 4)
        return (cut.square().sum() + tied.square().sum()).sqrt()

    assert oc.prove(gathered_norm, world=2, against=one)
    proof = oc.prove(partial(gathered_norm, "twice"), world=2, against=one)
    assert not proof and proof.wrong[0].what == "what is returned"


# -- rounding, and faults that are as small ----------------------------------------------------------------------------------


def long_sum(fault=0.0):
    torch.manual_seed(0)
    mesh = oc.ProcessMesh(range(oc.get_world_size()), ["dp"])
    x = oc.shard_tensor(torch.randn(20000) * 1e4, mesh, [oc.Shard(0)])
    return x.sum() * (1 + fault * (oc.get_world_size() > 1))


def test_rounding_is_told_from_a_fault_that_is_as_small():
    proof = oc.prove(long_sum, world=4)
    assert proof and proof.rounding is not None and 0 < proof.rounding[0] < 1e-2, str(proof)
    assert not oc.prove(long_sum, 1e-6, world=4)


def test_what_would_explain_a_value():
    x = torch.tensor([[1.0, 5.0, 2.0], [4.0, 0.5, 3.0]])
    right = {0: x, 1: x + 1}
    assert "another rank's part" in explained({0: x + 1, 1: x}, right)
    assert "of 1 step(s) before" in explained({0: x, 1: 3 - x}, right, earlier=[{1: 3 - x}])
    assert "shifted by 1 along dim 1" in explained({0: x.roll(1, 1), 1: x + 1}, right)
    assert "zero on rank(s) [1]" in explained({0: x, 1: 0 * x}, right)
    assert "0.3 times" in explained({0: 0.3 * x, 1: x + 1}, right)
    assert explained(right, right) == "" and explained({0: x * x}, {0: x}) == ""


# -- mistakes ----------------------------------------------------------------------------------------------------------------


def test_a_program_that_fails_says_where():
    with pytest.raises(ProofError, match=r"fails on one card.*no"):
        oc.prove(lambda: 1 / 0 if oc.get_world_size() == 1 else 0, world=2)
    with pytest.raises(ProofError, match=r"fails on 2 ranks: ZeroDivisionError.*rank 1 of 2"):
        oc.prove(lambda: 1 / 0 if oc.get_rank() == 1 else 0, world=2)
    with pytest.raises(ProofError, match="want the number of ranks"):
        oc.prove(lambda: 0, world=0)
    with pytest.raises(ProofError, match="no Python program"):
        Script(Path(__file__).parents[1] / "README.md")


def test_fleets_layers_are_one_cards():
    def program():
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 2, "pp_degree": 1}
        fleet.init(is_collective=True, strategy=strategy)
        torch.manual_seed(0)
        model = nn.Sequential(
            fleet.meta_parallel.ColumnParallelLinear(6, 8, gather_output=False, has_bias=True),
            fleet.meta_parallel.RowParallelLinear(8, 4, input_is_parallel=True, has_bias=True),
        )
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model = fleet.distributed_model(model)
        loss = model(torch.randn(3, 6)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    proof = oc.prove(program, world=2)
    assert proof, str(proof)


@pytest.mark.proof
def test_the_command(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, onecard as oc\n"
        "torch.manual_seed(0)\n"
        "mesh = oc.ProcessMesh(range(oc.get_world_size()), ['tp'])\n"
        "model = torch.nn.Linear(4, 8, bias=False)\n"
        "model.weight = oc.shard_tensor(model.weight, mesh, [oc.Shard(0)])\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(5):\n"
        "    x = torch.randn(2, 4) + (oc.get_rank() if sys.argv[1:] else 0)\n"
        "    loss = model(x).square().mean(); loss.backward(); optimizer.step(); optimizer.zero_grad()\n"
        "print('printed')\n"
    )
    right = python(tmp_path, "-m", "onecard", "prove", script, "--world", "2")
    assert right.returncode == 0 and right.stdout.startswith("Equal"), right.stderr
    wrong = python(tmp_path, "-m", "onecard", "prove", script, "--world", "2", "--", "apart")
    assert wrong.returncode == 1 and "train.py" in wrong.stdout and "First value" in wrong.stdout, (
        wrong.stdout + wrong.stderr
    )
