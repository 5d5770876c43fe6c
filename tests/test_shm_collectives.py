"""Every collective of the shared-memory backend, bit by bit against its meaning, and against Gloo."""

import ctypes
import itertools
import os

import pytest
import torch
import torch.distributed as dist
from amounts import PROOF, amount, cells, share
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from shm_programs import COPIES, FLOATS, INTEGERS, REDUCTIONS, Call, meaning, run

from onecard.comm import shm
from onecard.comm.shm.segment import TEXT_BYTES, Segment, SegmentLayout, rank_word
from onecard.testing import assert_close, multirank, run_ranks

pytestmark = pytest.mark.skipif(not shm.available(), reason="needs Linux")

OTHERS = (torch.bool, torch.int16, torch.complex64)
# Gloo cannot move OTHERS in every collective, and rounds the narrow floats at every step.
BEYOND_GLOO = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 20])
def test_nothing_lies_over_anything_else(size):
    segment = Segment.private(SegmentLayout(size))
    plan, turns = segment.plan, range(segment.plan.turns)
    pairs = list(itertools.product(range(size), turns))
    spans = [(0, 4 * (rank_word(size, 0))), (plan.texts, size * TEXT_BYTES)]
    spans += [(segment.card(*pair), plan.card_bytes) for pair in pairs]
    spans += [(segment.slot(*pair), plan.slot_bytes) for pair in pairs]
    spans += [(segment.ring(*pair), plan.ring_bytes) for pair in itertools.product(range(size), repeat=2)]
    ends = [start + length for start, length in sorted(spans)]
    assert all(end <= start for end, (start, _) in zip(ends, sorted(spans)[1:], strict=False))
    assert ends[-1] <= plan.total and plan.slot_bytes >= plan.chunk + plan.part >= plan.chunk + plan.chunk // size
    assert len(turns) & (len(turns) - 1) == 0  # so that turns go on in order where step numbers wrap
    assert len(pairs) > size  # a relay needs a buffer for each rank, and one to copy out


@st.composite
def calls(draw, size):
    kind = draw(st.sampled_from(COPIES + REDUCTIONS))
    members = draw(st.sampled_from([m for k in range(2, size + 1) for m in itertools.combinations(range(size), k)]))
    dtype = draw(st.sampled_from(FLOATS + INTEGERS + OTHERS))
    op = "sum"
    if kind in REDUCTIONS:
        ops = ["sum"] if dtype.is_complex else ["sum", "product", "min", "max"]
        ops += [] if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool else ["band", "bor", "bxor"]
        op = draw(st.sampled_from(ops))
    shape = draw(
        st.one_of(
            st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
            st.sampled_from([(1,), (1000,), (8192,), (70_001,), (3, 100_003)]),
        )
    )
    return Call(
        kind, members, shape, dtype, op,
        root=draw(st.integers(0, size - 1)), strided=draw(st.booleans()),
        asynchronous=draw(st.booleans()), seed=draw(st.integers(0, 1000)),
    )  # fmt: skip


def compare(program):
    """Runs a program on both backends; the groups are made as they are first needed, by all ranks in one order."""
    rank, groups = dist.get_rank(), {}
    for call in program:
        if call.members not in groups:
            groups[call.members] = [dist.new_group(call.members, backend=name) for name in ("shm", "gloo")]
        if rank not in call.members:
            continue
        ours, theirs = groups[call.members]
        place = call.members.index(rank)
        expected = meaning(call, place)
        for got, want in zip(run(call, ours, place), expected, strict=True):
            assert torch.equal(got, want), f"{call} differs on rank {rank}"
        # Gloo wants contiguous tensors, and cannot reduce everything.
        plain = Call(call.kind, call.members, call.shape, call.dtype, call.op, call.root, seed=call.seed)
        reduces = call.kind in REDUCTIONS
        beyond = call.dtype in OTHERS or (reduces and call.dtype in BEYOND_GLOO)
        if call.kind not in ("all_reduce_coalesced", "reduce_scatter_base") and not beyond:
            for got, want in zip(run(plain, theirs, place), expected, strict=True):
                if reduces:
                    assert_close(got, want, rtol=1e-5)
                else:
                    assert torch.equal(got, want), f"Gloo and this test disagree about {plain}"


@pytest.mark.share(1)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_programs_mean_what_gloo_means(size):
    examples = int(os.environ.get("ONECARD_EXAMPLES", amount(1, 24)))

    # No shrinking: an example costs seconds, and a call names all that it is.
    @settings(max_examples=examples, deadline=None, derandomize=not PROOF, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.lists(calls(size), min_size=15, max_size=15))
    def programs(program):
        run_ranks(compare, size, program, backend="gloo")

    programs()


def every_call(size):
    whole = tuple(range(size))
    kinds = [("sum", kind) for kind in COPIES] + [(op, kind) for kind in REDUCTIONS for op in ("sum", "max")]
    for (op, kind), dtype, shape in itertools.product(
        kinds, (torch.float32, torch.bfloat16), [(0,), (7,), (50_021,), (2, 150_007)]
    ):
        yield Call(kind, whole, shape, dtype, op, root=size - 1, seed=len(shape))


def spoiled(kinds):
    """Which of these calls a rank finds wrong when whatever rank 1 copies comes out with one bit changed."""
    from onecard.comm.shm import algorithms, relay

    def spoiling(move):
        def wrong(target, source, *size):
            move(target, source, *size)
            at = target if size else target.ctypes.data
            if 0 not in size:
                ctypes.c_ubyte.from_address(at + 3).value ^= 1  # of an exponent: nothing that rounding could hide

        return wrong

    rank, seen = dist.get_rank(), []
    if rank == 1:
        algorithms._move, ctypes.memmove = spoiling(algorithms._move), spoiling(ctypes.memmove)
        relay._move = spoiling(relay._move)
    for kind, count in kinds:
        call = Call(kind, (0, 1), (count,), torch.float32)
        got, want = run(call, dist.group.WORLD, rank), meaning(call, rank)
        seen.append(not all(torch.equal(g, w) for g, w in zip(got, want, strict=True)))
    return seen


def test_one_wrong_bit_is_seen_whichever_the_collective():
    """A control: the comparisons of this file can fail."""
    kinds = [(kind, 1000) for kind in COPIES + REDUCTIONS] + [("all_reduce", 10_000), ("all_reduce", 2_500_000)]
    found = run_ranks(spoiled, 2, kinds, backend="shm")
    assert [kind for kind, *wrong in zip(kinds, *found, strict=True) if not any(wrong)] == []


@pytest.mark.proof
@multirank(4, backend="shm")
def test_every_collective_and_size():
    rank = dist.get_rank()
    for call in share(every_call(4), 40):
        for got, want in zip(run(call, dist.group.WORLD, rank), meaning(call, rank), strict=True):
            assert torch.equal(got, want), call


@pytest.mark.proof
@multirank(2, backend="shm")
def test_groups_of_one_at_every_size():
    rank = dist.get_rank()
    alone = [dist.new_group([member], backend="shm") for member in range(2)][rank]
    kinds = [("sum", kind) for kind in COPIES] + [(op, kind) for kind in REDUCTIONS for op in ("sum", "max")]
    for (op, kind), dtype in cells(kinds, (torch.float32, torch.bfloat16), 2):
        for count in (0, 7, 50_021, SIZES[-1]):
            if count < SIZES[-1] or kind in ("all_reduce", "reduce"):
                call = Call(kind, (rank,), (count,), dtype, op)
                for got, want in zip(run(call, alone, 0), meaning(call, 0), strict=True):
                    assert torch.equal(got, want), call


SIZES = (100, 200_003, 5_000_011)  # the three ways of an all-reduce: at once, through slots, from rank to rank


def all_bits(dtype, op):
    generator = torch.Generator().manual_seed(dist.get_rank())
    whole = torch.randn(SIZES[-1], generator=generator).to(dtype)
    results = [whole[:size].clone() for size in SIZES]
    for x in results:
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
    return results


@pytest.mark.proof
@pytest.mark.parametrize(("dtype", "op"), [(torch.float32, "SUM"), (torch.bfloat16, "AVG")], ids=str)
def test_bits_are_equal_on_all_ranks_from_run_to_run_and_for_every_size(dtype, op):
    first, again = (run_ranks(all_bits, 3, dtype, op, backend="shm") for _ in range(2))
    small, middle, large = first[0]
    for results in first + again:
        assert all(torch.equal(got, want) for got, want in zip(results, first[0], strict=True))
    # And they are what one process finds that adds in the order of the ranks, whichever way the messages go.
    whole = [torch.randn(SIZES[-1], generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(3)]
    total = (whole[0].float() + whole[1].float()) + whole[2].float()
    assert torch.equal(large, (total / 3 if op == "AVG" else total).to(dtype))
    assert torch.equal(small, large[: len(small)]) and torch.equal(middle, large[: len(middle)])


def large_reductions():
    """Every kind of running total on its way from rank to rank."""
    rank, ops = dist.get_rank(), dist.ReduceOp
    base = torch.arange(8 * 2**20 + 77, dtype=torch.int32).remainder_(7).to(torch.int8)
    few = base[: len(base) // 2].half()
    for mine, op, expected in (
        (base * (rank + 1), ops.SUM, base * 3),
        (base * (3 * rank), ops.AVG, base * 3 // 2),
        (base == 3 * rank, ops.SUM, (base == 0) | (base == 3)),
        (few + rank, ops.PRODUCT, few * (few + 1)),
    ):
        dist.all_reduce(mine, op)
        assert torch.equal(mine, expected), (mine.dtype, op)
    kept = torch.full((3 * 2**20,), rank + 1.0)
    dist.reduce(kept, 1)
    assert kept.unique().tolist() == [3.0 if rank == 1 else 1.0]  # only the root's changes


@pytest.mark.proof
def test_large_reductions_of_every_kind():
    run_ranks(large_reductions, 2, backend="shm")


@multirank(3, backend="shm")
def test_averages_and_unknown_reductions():
    rank = dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        x = torch.tensor([rank + 1, -rank]).to(dtype)
        dist.all_reduce(x, dist.ReduceOp.AVG)
        assert torch.equal(x, torch.tensor([2, -1]).to(dtype))
    x = torch.tensor([rank - 5, rank + 5])
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x.tolist() == [-4, 6]
    with pytest.raises(RuntimeError, match="'band' is not defined on float32; on it: sum"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
    x = torch.tensor([3e38, float("inf")])
    dist.all_reduce(x)
    assert x.tolist() == [float("inf")] * 2  # and no warning
    dist.barrier()  # a wrong argument, refused on every rank before anything is sent, breaks nothing


@multirank(2, backend="shm")
def test_tensors_of_every_kind():
    rank = dist.get_rank()
    for dtype in (torch.float8_e4m3fn, torch.uint16, torch.complex128, torch.float16):
        x = torch.full((3, 5), rank + 1).to(torch.float32).to(dtype)
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x)
        assert [float(p.to(torch.complex64).real[0, 0]) for p in parts] == [1.0, 2.0]
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar == 1
    conjugate = torch.full((2,), 1j * (rank + 1)).conj()
    parts = [torch.empty(2, dtype=torch.complex64) for _ in range(2)]
    dist.group.WORLD.allgather([parts], [conjugate]).wait()  # below dist, which refuses conjugate views
    assert parts[1].tolist() == [-2j, -2j]
    leaf = torch.ones(4, requires_grad=True)
    (leaf * leaf).sum().backward()
    dist.all_reduce(leaf.grad)
    assert leaf.grad.tolist() == [4.0] * 4
    last = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last) * (rank + 1)
    dist.all_reduce(last)
    assert last.unique().tolist() == [3.0]
    with torch.inference_mode():
        frozen = torch.ones(3, 2).t() * rank
        dist.all_reduce(frozen)
        assert frozen.sum() == 6


@multirank(2, backend="shm")
def test_sparse_gradients_are_summed():
    rank = dist.get_rank()
    with torch.sparse.check_sparse_tensor_invariants(False):  # said aloud, or torch 2.11 warns
        x = torch.sparse_coo_tensor([[0, 2 + rank]], [1.0, 2.0], (5,))
    dist.all_reduce(x)
    assert x.to_dense().tolist() == [2.0, 0.0, 2.0, 2.0, 0.0]


@multirank(4, backend="shm")
def test_objects_subgroups_and_split_groups():
    rank = dist.get_rank()
    found = [None] * 4
    dist.all_gather_object(found, {"rank": rank})
    assert [f["rank"] for f in found] == [0, 1, 2, 3]
    listed = [f"from {rank}"]
    dist.broadcast_object_list(listed, 2)
    assert listed == ["from 2"]
    mine = [None]
    dist.scatter_object_list(mine, ["a", "b", "c", "d"] if rank == 1 else None, 1)
    assert mine == ["abcd"[rank]]
    pair = dist.split_group(dist.group.WORLD, [[0, 2], [1, 3]])
    assert pair is not None and dist.get_backend(pair) == "shm"
    x = torch.tensor([rank])
    dist.all_reduce(x, group=pair)
    assert x.item() == (2 if rank % 2 == 0 else 4)
    odd = dist.new_group([1, 3])
    if rank % 2:
        dist.broadcast(x, 3, group=odd)
    dist.destroy_process_group(pair)
    dist.monitored_barrier()


@multirank(3, backend="shm")
def test_messages_with_tags_out_of_order_and_from_anybody():
    rank = dist.get_rank()
    if rank:
        for tag in (1, 2, 3):
            dist.send(torch.full((tag,), float(10 * rank + tag)), 0, tag=tag)
        dist.send(torch.full((300_000,), float(rank)), 0, tag=9)
    else:
        for source in (2, 1):
            for tag in (3, 1, 2):
                x = torch.empty(tag)
                dist.recv(x, source, tag=tag)
                assert x.tolist() == [10.0 * source + tag] * tag
        large = [torch.empty(300_000) for _ in range(2)]
        sources = {dist.recv(x, tag=9): x for x in large}
        assert sorted(sources) == [1, 2] and all(x.unique().item() == r for r, x in sources.items())
    dist.barrier()


@multirank(2, backend="shm")
def test_large_messages_pass_each_other():
    """Neither waits for its send before the other receives; a send may also wait while its rank is elsewhere."""
    rank = dist.get_rank()
    sent, got = torch.full((1_000_000,), float(rank)), torch.empty(1_000_000)
    sending, receiving = dist.isend(sent, 1 - rank), dist.irecv(got, 1 - rank)
    dist.barrier()
    receiving.wait()
    sending.wait()
    assert got.unique().item() == 1 - rank


@multirank(2, backend="shm")
def test_work_runs_in_the_background_in_order():
    x = [torch.full((100_000,), float(i)) for i in range(6)]
    works = [dist.all_reduce(t, async_op=True) for t in x]
    values = works[-1].get_future().wait()  # nobody but the background runs it
    assert values[0] is x[-1] or torch.equal(values[0], x[-1])
    assert all(w.is_completed() and w.is_success() for w in works)
    for i, t in enumerate(x):
        assert t.unique().item() == 2 * i
    chained = dist.all_reduce(x[0], async_op=True).get_future().then(lambda f: f.value()[0].sum().item())
    assert chained.wait() == 0


@pytest.mark.proof
@multirank(4, backend="shm")
def test_soak():
    """Rounds of all sizes, on two groups at once, from two threads of work."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(1)
    pair = dist.new_group([0, 1])
    other = dist.new_group([2, 3])
    pair = pair if rank < 2 else other
    for i in range(amount(250, 1000)):
        size = int(torch.randint(1, 40_000 if i % 10 == 0 else 2_000, (1,), generator=generator))
        x = torch.full((size,), float(rank))
        work = dist.all_reduce(x, async_op=i % 2 == 0)
        y = torch.full((size,), float(rank))
        dist.all_reduce(y, group=pair)
        if work is not None:
            work.wait()
        assert x[0] == 6 and x[-1] == 6 and y[-1] == (1 if rank < 2 else 5)
        if i % 7 == 0:
            dist.broadcast(y, i % 4)
            dist.barrier()
