"""The ten most likely mistakes: what is wrong, where, and the call that works are in the message; or it is no mistake.

docs/howto/mistakes.md shows each with its text; the last test holds the page to the messages.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from amounts import PROOF
from launching import launched, start
from torch import nn

import onecard as oc
from onecard.comm import shm
from onecard.comm.agree import check
from onecard.errors import CommunicationError, DispatchError, LayoutError, OnecardError
from onecard.testing import RankError, assert_close, multirank, run_ranks

ROOT = Path(__file__).parents[1]


def pair(name: str = "x") -> oc.ProcessMesh:
    return oc.ProcessMesh([0, 1], [name])


def message(call: Callable[[], Any], kind: type[OnecardError]) -> str:
    """The text of the error that a call must raise."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def has(text: str, *parts: str) -> None:
    missing = [part for part in parts if part not in text]
    assert not missing, f"{missing} not in: {text}"


# 1. A batch smaller than the axis is no mistake: some ranks have nothing to do.


@pytest.mark.share(1)
@multirank(2)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_batch_smaller_than_the_axis_is_right(batch):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))
    twin = oc.shard_layer(copy.deepcopy(plain), pair())
    x, target = torch.randn(batch, 6), torch.randint(4, (batch,))
    parts = [oc.shard_tensor(t, pair(), [oc.Shard(0)]) for t in (x, target)]
    expected = nn.functional.cross_entropy(plain(x), target)
    loss = nn.functional.cross_entropy(twin(parts[0]), parts[1])
    expected.backward()
    loss.backward()
    assert parts[0].to_local().shape[0] == ((batch + 1) // 2, batch // 2)[oc.get_rank()]
    assert_close(loss.detach(), expected.detach())
    for mine, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad)


@multirank(2)
def test_a_rank_without_elements_takes_part_in_every_message():
    x = oc.shard_tensor(torch.tensor([[5.0]]), pair(), [oc.Shard(0)])  # all of it is on rank 0
    assert_close(oc.reshard(x, pair(), [oc.Shard(1)]), torch.tensor([[5.0]]))
    assert_close(oc.reshard(x, pair(), [oc.Replicate()]), torch.tensor([[5.0]]))


# 2. Heads that the axis does not divide are no mistake: the view that separates them gathers, and says why.


@multirank(2)
def test_heads_that_do_not_divide_are_gathered():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 12), torch.randn(12, 12)
    cut = oc.shard_tensor(weight, pair("tp"), [oc.Shard(0)])

    def heads(w, count):
        q = nn.functional.linear(x, w).view(2, 5, count, 12 // count).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q)

    with oc.explain() as even:
        assert_close(heads(cut, 4), heads(weight, 4))
    with oc.explain() as odd:
        assert_close(heads(cut, 3), heads(weight, 3))
    gathered = [m for m in odd.messages if m.step.kind == "all_gather" and m.operator == "view"]
    assert len(gathered) == 1 and "test_mistakes.py" in gathered[0].source
    # Comparing gathers as well; that is not the program's doing.
    assert not [m for m in even.messages if m.step.bytes and m.operator == "view"]


# 3, 4. Placements that do not fit.


@multirank(2)
def test_wrong_number_of_placements():
    mesh = oc.ProcessMesh([[0, 1]], ["dp", "tp"])
    x = oc.shard_tensor(torch.ones(4, 4), mesh, [oc.Replicate(), oc.Shard(0)])
    for name, call in {"shard_tensor": oc.shard_tensor, "reshard": oc.reshard, "from_local": oc.from_local}.items():
        value = x if name == "reshard" else torch.ones(4, 4)
        text = message(lambda call=call, value=value: call(value, mesh, [oc.Shard(0)]), LayoutError)
        has(text, f"{name} of [4, 4] float32: 1 placement(s) ['Shard(0)']", "2 axes ['dp', 'tp']")
        has(text, f"for example onecard.{name}(x, mesh, [Shard(0), Replicate()])")
    assert_close(x.full_tensor(), torch.ones(4, 4))  # nothing was sent, so the ranks are in step


@pytest.mark.share(1)
@multirank(2)
@pytest.mark.parametrize(
    ("shape", "placement", "parts"),
    [
        ((4, 4), oc.Shard(2), ("the tensor has 2 dim(s)", "-2 to 1 are possible", "mesh, [Shard(1)])")),
        ((), oc.Shard(0), ("the tensor has 0 dim(s)", "only Replicate() or Partial() fit", "mesh, [Replicate()])")),
    ],
)
def test_shard_dim_out_of_range(shape, placement, parts):
    text = message(lambda: oc.shard_tensor(torch.ones(shape), pair(), [placement]), LayoutError)
    has(text, f"shard_tensor of {list(shape)} float32: Shard({placement.dim}) on axis 'x'", *parts)


# 5. Ranks that disagree. The debug check compares through the store, so it sees what would hang.


def summand(part):
    """What local code would have to call Partial."""
    return part.sum(0)


def load_on_one_rank(mesh: oc.ProcessMesh) -> None:
    """Weights that only one rank loads."""
    layer = oc.shard_layer(nn.Linear(2, 3, bias=False, dtype=torch.float64).requires_grad_(False), mesh)
    if oc.get_rank() == 0:
        layer.weight.copy_(torch.ones(3, 2))
    layer(torch.ones(1, 2, dtype=torch.float64))


def drift(mesh: oc.ProcessMesh) -> None:
    """A weight cut along an axis of one rank: the other axis holds copies, of which rank 1 changes one."""
    w = oc.shard_tensor(torch.zeros(4, 6), mesh, [oc.Shard(1), oc.Replicate()])
    w.to_local()[2, 3] = oc.get_rank()
    w.sum()


def disagree(kind: str) -> str:
    """On a rank: make the mistake, return the error."""
    check.enable()
    rank, mesh = oc.get_rank(), pair()
    x = oc.shard_tensor(torch.arange(8.0).view(4, 2), mesh, [oc.Shard(0)])
    torch.manual_seed(0 if kind == "loads" else rank)
    far = torch.zeros(30, 100)
    far[29, 98] = rank
    programs: dict[str, Callable[[], Any]] = {
        "operator": lambda: x.sum().item() if rank == 0 else x.full_tensor(),
        "shape": lambda: oc.from_local(torch.ones(2 + rank, 3), mesh, [oc.Shard(0)]),
        "dtype": lambda: oc.from_local(torch.ones(2, dtype=(torch.float32, torch.float64)[rank]), mesh, [oc.Shard(0)]),
        "transfer": lambda: oc.reshard(x, oc.ProcessMesh([1, 0], ["y"]), [oc.Shard(0) if rank else oc.Replicate()]),
        "data": lambda: oc.shard_tensor(torch.full((2,), float(rank)), mesh, [oc.Shard(0)]),
        "operand": lambda: x * torch.tensor([1.0, 1.0 + rank]),
        "far": lambda: x.sum() + far,
        "seeds": lambda: oc.shard_layer(nn.Sequential(nn.ReLU(), nn.Linear(2, 3)), mesh),
        "local": lambda: oc.from_local(torch.full((2, 2), float(rank)), mesh, [oc.Replicate()]),
        "loads": lambda: load_on_one_rank(mesh),
        "map": lambda: oc.local_map(summand, [[oc.Shard(0)]], [oc.Replicate()])(x),
        "grid": lambda: drift(oc.ProcessMesh([[0, 1]], ["dp", "tp"])),
    }
    return message(programs[kind], CommunicationError)


def test_ranks_that_call_other_operators_are_named():
    for text in run_ranks(disagree, 2, "operator"):
        has(text, "ranks are out of step", "test_mistakes.py:", "on every rank")
        has(text, "  rank 0: all_reduce of [] float32, for 'x' [] of item, at ")
        has(text, "  rank 1: all_gather of [2, 2] float32, for 'x' [4, 2] of full_tensor, at ")


@pytest.mark.share(1)
@pytest.mark.parametrize(
    ("kind", "first", "second", "cure"),
    [
        ("shape", "[4, 3] float32", "[6, 3] float32", "shape=[...]"),
        ("dtype", "[4] float32", "[4] float64", "torch.set_default_dtype"),
    ],
)
def test_ranks_that_disagree_about_a_tensor_are_named(kind, first, second, cure):
    for text in run_ranks(disagree, 2, kind):
        has(text, f"  rank 0: from_local of a part of {first} as [x=Shard(0)]", cure)
        has(text, f"  rank 1: from_local of a part of {second} as [x=Shard(0)]")


def test_ranks_that_move_a_tensor_to_different_places_are_named():
    for text in run_ranks(disagree, 2, "transfer"):
        has(text, "ranks are out of step", "Every rank of both meshes makes this call", "test_mistakes.py:")
        has(text, "  rank 0: reshard of [4, 2] from [x=Shard(0)] to [y=Replicate], at ")
        has(text, "  rank 1: reshard of [4, 2] from [x=Shard(0)] to [y=Shard(0)], at ")


def cross_waits() -> None:
    """Rank 0 waits for rank 1 among all; rank 1 waits for rank 0 in a group of its own."""
    check.enable()
    rank = oc.get_rank()
    wide = oc.shard_tensor(torch.ones(3), oc.ProcessMesh([0, 1, 2], ["x"]), [oc.Shard(0)])
    narrow = oc.shard_tensor(torch.ones(2), pair(), [oc.Shard(0)])
    (wide if rank != 1 else narrow).sum().item()


def test_ranks_that_wait_for_each_other_in_other_groups_are_named():
    with pytest.raises(RankError) as caught:
        run_ranks(cross_waits, 3)
    assert re.search(r"ranks are out of step: rank \d waits for rank \d, which does not come\n", str(caught.value))
    has(str(caught.value), "rank 0: ", "all_reduce of [] float32, for 'x' [] of item, at ", "test_mistakes.py")
    has(str(caught.value), "rank 1: ", "the first message among ranks [0, 1], at ")


@multirank(2)
def test_the_check_finds_no_fault_in_a_right_program():
    check.enable()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    twin = oc.shard_layer(copy.deepcopy(plain), pair())
    optimizer = torch.optim.AdamW(twin.parameters(), foreach=True)
    for _ in range(2):
        x, target = torch.randn(5, 6), torch.randint(4, (5,))
        loss = nn.functional.cross_entropy(twin(oc.shard_tensor(x, pair(), [oc.Shard(0)])), target)
        loss.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
    assert loss.item() > 0


# 6. Two meshes


@multirank(2)
def test_an_index_below_zero_is_no_other_ranks():
    table = oc.shard_tensor(torch.ones(6, 2), pair(), [oc.Shard(0)])
    for index in (-1, -7, 6):
        for call in (torch.nn.functional.embedding, lambda i, t: torch.index_select(t, 0, i)):
            for given in (torch.ones(6, 2), table):
                with pytest.raises((IndexError, RuntimeError), match="out of range"):
                    call(torch.tensor([0, index]), given)


@multirank(2)
def test_operands_on_two_meshes():
    a, b = (oc.shard_tensor(torch.ones(2), oc.ProcessMesh([r], [n]), [oc.Shard(0)]) for r, n in ((0, "a"), (1, "b")))
    text = message(lambda: a + b, DispatchError)
    has(text, "aten.add.Tensor", "[2] float32 [a=Shard(0)]", "[2] float32 [b=Shard(0)]")
    has(text, repr(a.mesh), repr(b.mesh), f"onecard.reshard(x, {a.mesh!r}, [Replicate()])")
    assert_close(a + oc.reshard(b, a.mesh, [oc.Replicate()]), torch.full((2,), 2.0))


# 7. A value that is not here


def equals_itself(x):
    return torch.equal(x, x)


@pytest.mark.share(1)
@multirank(2)
@pytest.mark.parametrize("ask", [torch.Tensor.item, bool, float, equals_itself])
def test_the_value_of_a_tensor_that_lives_elsewhere(ask):
    x = oc.shard_tensor(torch.tensor(3.0), oc.ProcessMesh([0], ["pp"]), [oc.Replicate()])
    if oc.get_rank() == 0:
        assert ask(x) == ask(torch.tensor(3.0))
    else:
        text = message(lambda: ask(x), DispatchError)
        has(text, ".item()", "[pp=Replicate]", "rank 1 is not in", repr(x.mesh), "x.full_tensor().item()")
    assert x.full_tensor().item() == 3.0


# 8. torch.save


@multirank(2)
def test_saving_a_distributed_tensor():
    layer = oc.shard_layer(nn.Linear(2, 2), pair())
    for value in (layer.weight, layer.state_dict()):
        text = message(lambda value=value: torch.save(value, io.BytesIO()), DispatchError)
        has(text, "cannot be pickled", "[2, 2] float32 [x=Replicate]", "x.full_tensor()", "safetensors")
    file = io.BytesIO()
    torch.save({name: t.full_tensor() for name, t in layer.state_dict().items()}, file)
    file.seek(0)
    assert_close(torch.load(file)["weight"], layer.weight.detach().full_tensor())


# 9. Writing to a pending sum is no mistake.


@multirank(2)
def test_writing_to_a_pending_sum_is_right():
    a, b = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.ones(4, 3)
    pending = oc.shard_tensor(a, pair(), [oc.Shard(1)]) @ oc.shard_tensor(b, pair(), [oc.Shard(0)])
    assert isinstance(pending.placements[0], oc.Partial)
    expected = a @ b
    for change in (lambda t: t.add_(1), lambda t: t.mul_(2), lambda t: t.relu_(), lambda t: t[0].zero_()):
        change(pending)
        change(expected)
        assert_close(pending, expected)


# 10. A plain tensor that differs


def test_a_plain_operand_that_differs_is_named():
    for text in run_ranks(disagree, 2, "operand"):
        has(text, "mul at ", "test_mistakes.py:", "the plain tensor 'other' [2] float32 counts as Replicate")
        has(text, "  rank 0: [1, 1]", "  rank 1: [1, 2]", "torch.manual_seed", "src=0", "from_local")


def test_data_that_differs_is_named():
    for text in run_ranks(disagree, 2, "data"):
        has(text, "shard_tensor as [x=Shard(0)] at ", "'data' [2] float32", "  rank 0: [0, 0]", "  rank 1: [1, 1]")


def test_the_first_place_that_differs_is_named_however_far():
    for text in run_ranks(disagree, 2, "far"):
        has(
            text,
            "'other' [30, 100] float32",
            "first at [29, 98]",
            "rank 0: [..., 0, 0, 0, 0]",
            "rank 1: [..., 0, 0, 1, 0]",
        )


def test_parameters_are_called_by_their_names():
    for text in run_ranks(disagree, 2, "seeds"):
        has(
            text, "the plain tensor 'data' (parameter 1.weight) [3, 2] float32 counts as Replicate", "torch.manual_seed"
        )


def test_weights_that_one_rank_loads_are_named():
    for text in run_ranks(disagree, 2, "loads"):
        has(
            text, "ranks are out of step", "rank 0: copy_ (parameter weight) with the plain tensor 'src' [3, 2] float32"
        )
        has(text, "rank 1: linear with the plain tensor 'input' [1, 2] float64", "'weight' (parameter weight) [3, 2]")


@pytest.mark.share(1)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("local", "from_local at "),
        ("map", "local_map(summand), output 0 at "),
        ("grid", "sum at "),
    ],
)
def test_copies_that_differ_are_named(kind, words):
    where = {"local": "[0, 0]", "map": "[0]", "grid": "[2, 3]"}[kind]
    for text in run_ranks(disagree, 2, kind):
        has(text, words, "promises equal copies", f"first at {where}", "test_mistakes.py:", "Partial(), or a part")


@multirank(4)
def test_copies_are_compared_between_the_ranks_that_hold_the_same_part():
    check.enable()
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    w = oc.shard_tensor(torch.arange(8.0).view(2, 4), mesh, [oc.Replicate(), oc.Shard(1)])
    assert_close((w * 2).sum(), torch.tensor(56.0))
    if oc.get_rank() == 3:
        w.to_local()[1, 1] = -1
    text = message(lambda: w * 2, CommunicationError)
    has(text, "mul at ", "'self' [2, 4] float32 [dp=Replicate, tp=Shard(1)] promises equal copies")
    has(text, "first at [1, 3]" if oc.get_rank() % 2 else "but it differs between ranks 1, 3\n")
    has(text, "  rank 1: [2, 3, 6, 7]", "  rank 3: [2, 3, 6, -1]")


@multirank(2)
def test_memory_that_nobody_has_written_to_may_differ():
    check.enable()
    x = oc.shard_tensor(torch.zeros(3), pair(), [oc.Replicate()])
    x.to_local().fill_(oc.get_rank())  # as torch.empty may leave it
    assert_close(torch.zeros_like(x), torch.zeros(3))
    x.view(3, 1)[0].fill_(2)
    x.copy_(torch.ones(3))
    assert_close(x + 1, torch.full((3,), 2.0))


@multirank(2)
def test_parts_that_are_all_the_whole_batch_are_warned_of():
    check.enable()
    batch = torch.arange(8.0)
    with pytest.warns(UserWarning, match=r"from_local at .*test_mistakes.py:\d+: ranks \[0, 1\] all give equal values"):
        oc.from_local(batch, pair(), [oc.Shard(0)])
    oc.from_local(batch + oc.get_rank(), pair(), [oc.Shard(0)])  # parts
    oc.from_local(batch, pair(), [oc.Partial()])  # summands
    oc.from_local(torch.ones(8), pair(), [oc.Shard(0)])  # a constant


@torch.library.custom_op("mistakes::centre", mutates_args=())
def centre(x: torch.Tensor) -> torch.Tensor:
    """Its rule, below, is wrong: the mean needs all rows."""
    return x - x.mean(0)


@centre.register_fake
def _(x):
    return torch.empty_like(x)


@multirank(2)
def test_a_rule_that_nobody_has_proved_is_told_once():
    check.enable()
    oc.register_rule(centre, "n d -> n d")
    x = oc.shard_tensor(torch.arange(8.0).view(4, 2), pair(), [oc.Shard(0)])
    with pytest.warns(UserWarning) as warned:
        centre(x)
        centre(x)
    (said,) = [str(w.message) for w in warned]
    assert re.match(r"mistakes::centre at .*test_mistakes.py:\d+ runs by a rule .* without verify=", said)


@pytest.mark.skipif(not shm.available(), reason="needs Linux; Gloo does not compare, and waits")
@multirank(2, backend="shm")
def test_a_mismatch_without_the_debug_check_shows_both_sides():
    x = oc.shard_tensor(torch.arange(8.0).view(4, 2), pair(), [oc.Shard(0)])
    with pytest.raises(CommunicationError) as caught:
        x.sum().item() if oc.get_rank() == 0 else x.full_tensor()
    has("".join(caught.value.__notes__), "rank 0: message 1, all_reduce(sum), for 'x' [] of item", "test_mistakes.py:")
    has("".join(caught.value.__notes__), "rank 1: message 1, all_gather, for 'x' [4, 2] of full_tensor")


def test_an_error_in_shard_fn_names_the_submodule():
    net = nn.Sequential(nn.ReLU(), nn.Linear(2, 3))

    def cut(name, module, mesh):
        for key, p in list(module.named_parameters(recurse=False)):
            setattr(module, key, oc.shard_tensor(p, mesh, [oc.Shard(1)]))

    with pytest.raises(LayoutError) as caught:
        oc.shard_layer(net, oc.ProcessMesh([0], ["tp"]), cut)
    assert caught.value.__notes__ == ["shard_layer: in shard_fn, for submodule '1' (Linear)"]


# The page, and ONECARD_CHECK under the launcher


def launch(folder: Path, source: str, **environment: str) -> str:
    """What `onecard run` prints of a program that must fail, soon."""
    status, printed = launched(folder, source, COLUMNS="400", **environment)
    assert status != 0, printed
    return printed


def launch_anew(folder: Path, source: str, **environment: str) -> str:
    """The same from a shell, where ranks import everything themselves."""
    with pytest.MonkeyPatch.context() as patch:
        for name, text in {"COLUMNS": "400", **environment}.items():
            patch.setenv(name, text)
        with start(folder, source, "--nproc_per_node", "2", name="train.py") as process:
            printed = "".join(process.communicate(timeout=120))
    assert process.returncode != 0, printed
    return printed


def programs_of_the_page() -> list[tuple[str, str]]:
    """(program, what it raises) of the page's programs that need ONECARD_CHECK=1."""
    page = (ROOT / "docs" / "howto" / "mistakes.md").read_text(encoding="utf-8")
    return re.findall(r"```python check\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)


def test_the_launcher_ends_ranks_that_wait_in_different_collectives(tmp_path):
    quiet = {"ONECARD_TIMEOUT": "110", "ONECARD_BACKEND": "gloo", "ONECARD_CHECK": "0"}
    printed = launch(tmp_path, programs_of_the_page()[0][0], **quiet)
    has(printed, "CommunicationError: ranks are out of step", "rank 0 waits in all_reduce #1 of ranks 0, 1 (4 bytes)")
    has(printed, "rank 1 waits in all_gather #1 of ranks 0, 1 (16 bytes)", "ONECARD_CHECK=1")


def test_shared_memory_names_both_collectives_by_itself(tmp_path):
    printed = launch(tmp_path, programs_of_the_page()[0][0], ONECARD_BACKEND="shm")
    has(
        printed, "the ranks call different collectives", "all_reduce(sum) #1 of 1 float32", "all_gather #1 of 8 float32"
    )


BEFORE = """
import torch
from torch.utils.data import DataLoader

import onecard as oc

mesh = oc.ProcessMesh([0, 1], dim_names=["dp"])
"""


@pytest.mark.share(1)
@pytest.mark.parametrize(
    ("program", "said"),
    [
        # The rank that is asked first is right; either may be.
        ("oc.manual_seed(oc.get_rank())\n", r"onecard\.manual_seed\((\d)\) on rank \1, but rank (?!\1)(\d) gave \2"),
        ("torch.manual_seed(oc.get_rank())\n", r"begins with samples \["),
    ],
)
def test_what_ranks_said_before_they_met_is_compared_at_the_first_message(program, said, tmp_path):
    """Under the launcher there is no process group yet when a program seeds and reads its first batch."""
    loop = """
for x in oc.shard_dataloader(DataLoader(torch.arange(64.0), 8, shuffle=True), mesh, "dp"):
    x.sum().item()
    print("trained")
"""
    printed = launch(tmp_path, BEFORE + program + loop)
    assert re.search(said, re.sub(r"[\s│]+", " ", printed)), printed
    assert "\ntrained" not in printed


@pytest.mark.share(1)
@pytest.mark.parametrize("number", range(4))
def test_the_page_shows_what_the_check_says_and_all_ranks_end(number, tmp_path):
    assert len(programs_of_the_page()) == 4
    source, expected = programs_of_the_page()[number]
    show = launch_anew if PROOF and not number else launch
    printed = show(tmp_path, source, ONECARD_CHECK="1").replace(f"{tmp_path.resolve()}/", "")
    flat = re.sub(r"[\s│]+", " ", printed)
    assert re.sub(r"\s+", " ", expected).strip() in flat, printed


def marked() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = oc.shard_layer(nn.Linear(2, 2), oc.ProcessMesh([0], ["dp"]))
    return net, torch.optim.SGD(net.parameters(), 0.1)


WRONG_ARGUMENTS: dict[str, tuple[Callable[[], Any], str]] = {
    "another axis": (
        lambda: oc.shard_optimizer(marked()[1], oc.ShardingStage1("data")),
        r"ShardingStage1\('data'\): no mesh .* \['dp'\]: onecard.ShardingStage1\('dp'\)",
    ),
    "no stage": (lambda: oc.shard_optimizer(marked()[1], 1), r"shard_optimizer\(optimizer, 1\): want a stage of ZeRO"),
    "a class": (lambda: oc.shard_optimizer(marked()[1], oc.ShardingStage1), "want a stage of ZeRO, such as"),
    "a dict of plans": (
        lambda: oc.shard_layer(nn.Linear(2, 2), oc.ProcessMesh([0], ["dp"]), {"weight": 0}),
        "shard_fn is a dict: want a function",
    ),
    "turned": (
        lambda: oc.shard_layer(oc.ProcessMesh([0], ["dp"]), nn.Linear(2, 2)),
        r"shard_layer\(ProcessMesh, Linear\): want shard_layer\(module, mesh",
    ),
    "a plan by place": (lambda: oc.parallelize(nn.Linear(2, 2), oc.Plan()), "a plan is given by name"),
    "a dict for a plan": (
        lambda: oc.parallelize(nn.Linear(2, 2), plan={"dp": 1}),
        "a plan is given by name, as an oc.Plan",
    ),
    "zero of nothing": (
        lambda: oc.parallelize(nn.Linear(2, 2), plan=oc.Plan(zero=3)),
        r"zero=3 divides an optimizer's states, and no optimizer is given: parallelize\(model, optimizer",
    ),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_wrong_arguments_are_named(name: str) -> None:
    call, words = WRONG_ARGUMENTS[name]
    with pytest.raises(OnecardError, match=words):
        call()
