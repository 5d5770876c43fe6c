"""explain and no_implicit_communication: every message, with the operator and the line that need it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fleet_programs import begin
from torch import Tensor, nn
from torch.utils.data import DataLoader

import onecard as oc
from onecard import fleet
from onecard.comm.base import record
from onecard.comm.issue import collectives
from onecard.errors import ImplicitCommunication
from onecard.testing import assert_close, multirank

MESH = oc.ProcessMesh([0, 1], ["x"])
MESH_2D = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
HERE = Path(__file__).name


def line(mark: str) -> str:
    """The place of the line of this file that ends in a comment."""
    text = Path(__file__).read_text().splitlines()
    (number,) = [i for i, code in enumerate(text, 1) if code.endswith(f"  # {mark}")]
    return f"{HERE}:{number}"


def place(message: Any) -> str:
    return f"{Path(message.source.rpartition(':')[0]).name}:{message.source.rpartition(':')[2]}"


def printed(report: oc.Report) -> list[list[str]]:
    """The rows of the printed tables; a cell that goes over several lines is joined."""
    rows: list[list[str]] = []
    for text in str(report).splitlines():
        cells = [cell.strip() for cell in text.split("│")[1:-1]]
        if cells and cells[0]:
            rows.append(cells)
        elif cells:
            rows[-1] = [" ".join(filter(None, pair)) for pair in zip(rows[-1], cells, strict=True)]
    return rows


def matmul_relu() -> tuple[Tensor, Tensor]:
    """Section 3 of seed 002."""
    A = oc.shard_tensor(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), MESH, [oc.Replicate()])
    B = oc.shard_tensor(torch.tensor([[5.0, 6.0], [7.0, 8.0]]), MESH, [oc.Shard(0)])
    C = torch.matmul(A, B)  # the product
    D = torch.relu(C)  # the relu
    return C, D


@multirank(2)
def test_matmul_relu_of_seed_002() -> None:
    with oc.explain() as report:
        C, D = matmul_relu()
    assert_close([C, D], [torch.tensor([[19.0, 22.0], [43.0, 50.0]])] * 2)
    cut, summed = report.messages
    # A is sliced to Shard(1), which sends nothing ...
    assert (cut.operator, cut.operand, cut.shape, place(cut)) == ("mm", "self", (2, 2), line("the product"))
    assert (cut.step.kind, cut.step.bytes, cut.step.axis, cut.tensors) == ("slice", 0, 0, 1)
    assert cut.step.source.placements == (oc.Replicate(),) and cut.step.target.placements == (oc.Shard(1),)
    # ... the result is Partial, and summed before the relu.
    assert (summed.operator, summed.operand, place(summed)) == ("relu", "self", line("the relu"))
    assert (summed.step.kind, summed.step.op, summed.step.bytes) == ("all_reduce", "sum", 16)
    assert summed.step.source.placements == (oc.Partial(),) and summed.step.target.placements == (oc.Replicate(),)
    assert not cut.explicit and not summed.explicit
    assert report.bytes == 16 and 0 < report.seconds < 1


@multirank(2)
def test_the_printed_report_has_it_all() -> None:
    with oc.explain() as report:
        matmul_relu()
    mm, relu, *totals = printed(report)
    us = [f"{m.step.seconds * 1e6:.1f}" for m in report.messages]
    assert mm == [
        "mm", line("the product"), "self [2, 2]", "x=Replicate", "x=Shard(1)", "slice", "x", "0", us[0], "x cuts k",
    ]  # fmt: skip
    assert relu == [
        "relu", line("the relu"), "self [2, 2]", "x=Partial(sum)", "x=Replicate", "all_reduce(sum)", "x", "16", us[1],
        "relu needs the pending sum whole; x cuts nothing",
    ]  # fmt: skip
    assert [row[:5] for row in totals] == [["0", "all_reduce", "x", "1", "16"], ["0", "slice", "x", "1", "0"]]
    assert "sent 16 bytes, about " in str(report)
    assert max(len(row) for row in str(report).splitlines()) <= 170


@multirank(2)
def test_steps_are_totalled_on_their_own() -> None:
    with oc.explain() as report:
        for step in range(3):
            if step:
                report.next_step()
            for _ in range(step):
                matmul_relu()
    assert [len(messages) for messages in report.steps] == [0, 2, 4]
    assert [sum(m.step.bytes for m in messages) for messages in report.steps] == [0, 16, 32]
    assert len(report.messages) == 6 and report.bytes == 48
    assert [row[:5] for row in printed(report)[6:]] == [
        ["1", "all_reduce", "x", "1", "16"], ["1", "slice", "x", "1", "0"],
        ["2", "all_reduce", "x", "2", "32"], ["2", "slice", "x", "2", "0"],
    ]  # fmt: skip


def test_an_empty_report_prints() -> None:
    with oc.explain() as report:
        torch.ones(2).sum()
    assert report.messages == [] and "sent 0 bytes" in str(report)


def test_one_rank_sends_nothing() -> None:
    one = oc.ProcessMesh([0], ["x"])
    with oc.explain() as report, oc.no_implicit_communication():
        x = oc.shard_tensor(torch.ones(2, 2), one, [oc.Shard(1)])
        assert torch.relu(x @ x).sum().item() == 8
    assert report.bytes == 0


@multirank(2)
def test_reports_nest_and_end() -> None:
    with oc.explain() as outer:
        matmul_relu()
        with oc.explain() as inner:
            matmul_relu()
    matmul_relu()
    assert len(outer.messages) == 4 and len(inner.messages) == 2
    with pytest.raises(ZeroDivisionError), oc.explain():
        _ = 1 / 0
    assert record.observers.here == []


@multirank(2)
def test_what_the_program_asks_for_is_explicit() -> None:
    x = oc.shard_tensor(torch.ones(4, 2), MESH, [oc.Shard(0)])
    pending = oc.from_local(torch.ones(4), MESH, [oc.Partial()])
    with oc.explain() as report:
        oc.reshard(x, MESH, [oc.Shard(1)])  # the reshard
        x.full_tensor()
        pending.reduce_partial()
    assert [(m.step.kind, m.explicit) for m in report.messages] == [
        ("all_to_all", True), ("all_gather", True), ("all_reduce", True),
    ]  # fmt: skip
    assert [m.step.bytes for m in report.messages] == [8, 16, 16]
    assert place(report.messages[0]) == line("the reshard") and report.messages[0].operator == "reshard"


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) * 2  # in the module


@multirank(2)
def test_lines_are_the_users_innermost() -> None:
    """Also below torch's own modules and in backward, whose operators run where backward was called."""
    weight = oc.shard_tensor(torch.ones(2, 2), MESH, [oc.Replicate()], requires_grad=True)
    x = oc.shard_tensor(torch.ones(4, 2), MESH, [oc.Shard(0)])
    pending = oc.from_local(torch.ones(4, 2), MESH, [oc.Partial()])
    with oc.explain() as report:
        nn.Sequential(nn.Identity(), Twice())(pending)
        loss = (x @ weight).square().sum()
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        gradient.exp()  # the sum
    assert [place(m) for m in report.messages if m.step.bytes] == [line("in the module"), line("the sum")]
    with oc.explain() as report:
        (weight.t() @ oc.shard_tensor(torch.ones(2, 3), MESH, [oc.Shard(0)])).relu().sum().backward()  # backward
    assert {place(m) for m in report.messages} == {line("backward")}


@pytest.mark.proof
def test_lines_are_the_users_where_torch_is_reached_through_a_link(tmp_path) -> None:
    (tmp_path / "link").symlink_to(Path(torch.__file__).parents[1])
    program = tmp_path / "program.py"
    program.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch\n"
        "from onecard.comm.base.record import user_line\n"
        "class Says(torch.nn.Module):\n"
        "    forward = staticmethod(user_line)\n"
        "print(Says()())\n"
    )
    link = str(tmp_path / "link")
    ran = subprocess.run([sys.executable, str(program), link], capture_output=True, text=True, timeout=300, check=True)
    assert ran.stdout.strip() == f"{program}:6"


@multirank(4)
def test_axes_are_named() -> None:
    x = oc.shard_tensor(torch.ones(4, 4), MESH_2D, [oc.Shard(0), oc.Shard(1)])
    w = oc.shard_tensor(torch.ones(4, 2), MESH_2D, [oc.Replicate(), oc.Shard(0)])
    with oc.explain() as report:
        torch.relu(x @ w).full_tensor()
    assert [(m.step.kind, m.step.source.mesh.dim_names[m.step.axis]) for m in report.messages] == [
        ("all_reduce", "tp"), ("all_gather", "dp"),
    ]  # fmt: skip
    reduced, gathered = printed(report)[:2]
    assert reduced[3:7] == ["dp=Shard(0), tp=Partial(sum)", "dp=Shard(0), tp=Replicate", "all_reduce(sum)", "tp"]
    assert gathered[3:7] == ["dp=Shard(0), tp=Replicate", "dp=Replicate, tp=Replicate", "all_gather", "dp"]


@multirank(2)
def test_the_first_implicit_message_raises() -> None:
    with pytest.raises(ImplicitCommunication) as caught, oc.no_implicit_communication():
        matmul_relu()
    text = str(caught.value)
    assert text.startswith("relu at ") and line("the relu") in text  # slicing A for the product was free
    for part in (
        "needs all_reduce of 16 bytes on axis 'x'",
        "operand 'self' [2, 2] is [x=Partial(sum)] and must become [x=Replicate]",
        "relu needs the pending sum whole",
        "x = onecard.reshard(x, mesh, [Replicate()])",
    ):
        assert part in text
    assert record.observers.here == []
    matmul_relu()  # allowed again


@multirank(2)
def test_the_advice_of_the_error_works() -> None:
    A = oc.shard_tensor(torch.eye(2), MESH, [oc.Replicate()])
    B = oc.shard_tensor(torch.ones(2, 2), MESH, [oc.Shard(0)])
    with oc.no_implicit_communication(), oc.explain() as report:
        C = oc.reshard(A @ B, MESH, [oc.Replicate()])
        assert_close(torch.relu(C), torch.ones(2, 2))  # gathering is asked for as well
    assert [(m.step.kind, m.explicit) for m in report.messages] == [("slice", False), ("all_reduce", True)]


@multirank(2)
def test_nothing_was_sent_when_it_raises() -> None:
    """All ranks raise before the message, so they go on together."""
    pending = oc.from_local(torch.full((2,), 1.0 + torch.distributed.get_rank()), MESH, [oc.Partial()])
    with pytest.raises(ImplicitCommunication, match="exp at "), oc.no_implicit_communication():
        pending.exp()
    assert pending.placements == (oc.Partial(),)
    assert_close(pending, torch.full((2,), 3.0))


@multirank(2)
def test_backward_and_optimizers_are_watched_too() -> None:
    weight = oc.shard_tensor(torch.ones(2, 2), MESH, [oc.Replicate()], requires_grad=True)
    optimizer = oc.shard_optimizer(torch.optim.SGD([weight], lr=0.1))
    with oc.no_implicit_communication():
        (oc.shard_tensor(torch.ones(4, 2), MESH, [oc.Shard(0)]) @ weight).sum().backward()  # leaves a pending gradient
        with pytest.raises(ImplicitCommunication, match=r"gradients at .* needs all_reduce of 16 bytes"):
            optimizer.step()
        weight.grad.reduce_partial()
        optimizer.step()
    assert_close(weight.detach(), torch.full((2, 2), 0.6))


@multirank(2)
def test_parameters_have_their_names() -> None:
    def cut(name: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
        if name == "0":
            layer.weight = oc.shard_tensor(layer.weight, mesh, [oc.Shard(0)])  # type: ignore[arg-type]

    net = oc.shard_layer(nn.Sequential(nn.Linear(2, 4, bias=False)), MESH, cut)
    with oc.explain() as report:
        net(oc.shard_tensor(torch.ones(6, 2), MESH, [oc.Shard(0)]))
    assert [m.operand for m in report.messages] == ["weight (parameter 0.weight)"]


@multirank(2)
def test_messages_outside_operators_are_listed() -> None:
    """What a GradScaler asks of all ranks, and the data that one rank reads for others."""
    weight = oc.shard_tensor(torch.ones(2, 2), MESH, [oc.Shard(0)], requires_grad=True)
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale((weight * weight).sum()).backward()
    with oc.explain() as report:
        scaler.unscale_(optimizer)
    assert [(m.operator, m.operand, m.step.kind, m.step.op, m.step.bytes) for m in report.messages] == [
        ("unscale", "found_inf", "all_reduce", "max", 4)
    ]
    loader = oc.shard_dataloader(DataLoader(torch.arange(6.0), batch_size=4), MESH)
    with oc.explain() as report, oc.no_implicit_communication():
        list(loader)
    assert {(m.operator, m.step.kind) for m in report.messages} == {("shard_dataloader", "broadcast")}
    assert [m.step.bytes for m in report.messages if m.operand == "batch"] == [16, 8, 0]  # the last says: no more
    assert "broadcast" in str(report)


@multirank(4)
def test_a_change_of_mesh_is_listed() -> None:
    x = oc.shard_tensor(torch.ones(4, 2), MESH, [oc.Shard(0)])
    with oc.explain() as report:
        oc.reshard(x, oc.ProcessMesh([2, 3], ["x"]), [oc.Shard(0)])
    (message,) = report.messages
    assert message.explicit and message.step.kind == "transfer"
    assert message.step.bytes == (16 if torch.distributed.get_rank() < 2 else 0)
    assert "between meshes" in " ".join(str(report).split())


def _programs() -> dict[str, Callable[[nn.Module, torch.optim.Optimizer], tuple[Any, Any]]]:
    """Ways to lay out a model and its optimizer over two ranks."""

    def grouped(level: str, net: nn.Module, opt: torch.optim.Optimizer) -> tuple[Any, Any]:
        begin()
        return fleet.group_sharded_parallel(net, opt, level)[:2]

    def by_grid(axis: str, net: nn.Module, opt: torch.optim.Optimizer) -> tuple[Any, Any]:
        begin(**{axis: 2})
        return fleet.distributed_model(net), fleet.distributed_optimizer(opt)

    def by_marks(stage: type, net: nn.Module, opt: torch.optim.Optimizer) -> tuple[Any, Any]:
        net = oc.shard_layer(net, MESH)
        return net, oc.shard_optimizer(type(opt)(net.parameters()), stage("x", MESH))

    return {
        **{level: partial(grouped, level) for level in ("os", "os_g", "p_g_os")},
        **{f"{axis}_degree": partial(by_grid, axis) for axis in ("dp", "sharding")},
        **{s.__name__: partial(by_marks, s) for s in (oc.ShardingStage1, oc.ShardingStage2, oc.ShardingStage3)},
    }


@multirank(2)
def test_every_message_of_a_step_is_listed() -> None:
    """What is issued, the small questions between ranks included, is what is shown: of each kind as many."""
    issue = collectives.issue
    for name, laid_out in _programs().items():
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        net, opt = laid_out(net, torch.optim.AdamW(net.parameters(), 0.01))
        for _ in range(2):
            sent: list[str] = []

            def counted(what: Any, *args: Any, to: list[str] = sent, **named: Any) -> Any:
                to.append(what.operation)
                return issue(what, *args, **named)

            with oc.explain() as report, patch.object(collectives, "issue", counted):
                x = torch.ones(2, 6)
                x = oc.shard_tensor(x, MESH, [oc.Shard(0)]) if name.startswith("Sharding") else x
                net(x).square().mean().backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                opt.step()
                opt.zero_grad()
            listed = [m.step.kind for m in report.messages if m.step.kind != "slice"]  # which sends nothing
            assert len(listed) == len(sent), (name, sent, listed)
