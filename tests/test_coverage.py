"""coverage in one process, and register_rule: rows for custom operators, proved when they are stated."""

import pytest
import torch
from torch import nn

import onecard as oc
from onecard.errors import LayoutError, RuleError
from onecard.rules import rows
from onecard.testing import assert_close, multirank

S, R, P = oc.Shard, oc.Replicate, oc.Partial


def grid():
    return oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def megatron(name, module, mesh):
    if name == "up":
        module.weight = oc.shard_tensor(module.weight, mesh, [R(), S(0)])
        module.bias = oc.shard_tensor(module.bias, mesh, [R(), S(0)])
    if name == "down":
        module.weight = oc.shard_tensor(module.weight, mesh, [R(), S(1)])


def test_a_ruled_model():
    report = oc.coverage(Mlp(), torch.ones(8, 16), grid(), megatron, [[S(0), R()]])
    assert report.error == "" and not report.by("gathered") and report.gathered_bytes == 0
    found = {(o.operator, o.phase): o.how for o in report.operators}
    assert found["linear.default", "forward"] == "ruled" and found["linear_backward.default", "backward"] == "ruled"
    assert "threshold_backward.default" in str(report) and "dp=Shard(0)" in str(report)
    assert not torch.distributed.is_initialized()


def test_the_model_is_left_alone():
    model = Mlp()
    oc.coverage(model, torch.ones(8, 16), grid(), megatron, [[S(0), R()]])
    assert (
        type(model.up.weight) is nn.Parameter and model.up.weight.device.type == "cpu" and model.up.weight.grad is None
    )


def test_bytes_are_those_of_the_real_run():
    """Rank 0 of 4 in one process says what rank 0 of 4 real ranks sends."""
    assert oc.coverage(lambda x: x.softmax(0), torch.ones(8, 6), *CUT).bytes == real_bytes()[0]


CUT = (oc.ProcessMesh([0, 1, 2, 3], ["x"]), None, [[S(0)]])


@multirank(4)
def real_bytes():
    x = oc.shard_tensor(torch.ones(8, 6), CUT[0], [S(0)])
    with oc.explain() as report:
        x.softmax(0)
    return report.bytes


def least_squares(x):
    """An operator that has no row."""
    return torch.linalg.lstsq(x, torch.ones(x.shape[0], 1)).solution


def test_gathered_and_refused():
    mesh = oc.ProcessMesh([0, 1, 2, 3], ["x"])
    report = oc.coverage(least_squares, torch.ones(8, 6), mesh, None, [[S(0)]])
    (gathered,) = report.by("gathered")
    assert gathered.operator == "linalg_lstsq.default"
    assert gathered.bytes == report.gathered_bytes == 2 * 6 * 4 * 3  # a part of 2 x 6 floats to three others
    stopped = oc.coverage(lambda x: x.exp().resize_(2, 2), torch.ones(8, 6), mesh, None, [[S(0)]])
    assert "resize_" in stopped.error and [o.operator for o in stopped.by("refused")] == ["resize_.default"]
    assert "stopped: resize_" in str(stopped)


def test_warnings_are_kept_for_the_real_run():
    oc.coverage(least_squares, torch.eye(4), oc.ProcessMesh([0, 1], ["x"]), None, [[S(0)]])
    x = oc.shard_tensor(torch.eye(4), oc.ProcessMesh([0], ["x"]), [S(0)])
    with pytest.warns(oc.GatheredOperatorWarning):
        least_squares(x)


def test_random_numbers_are_kept_for_the_real_run():
    torch.manual_seed(0)
    report = oc.coverage(nn.Dropout(0.5), torch.ones(8, 6), grid(), None, [[S(0), R()]])
    assert report.error == "" and report.by("built in")
    drawn = torch.rand(3)
    torch.manual_seed(0)
    assert_close(drawn, torch.rand(3))


def test_values_that_are_read():
    def program(x):
        return x * 2 if x.sum() > 0 else x

    mesh = oc.ProcessMesh([0], ["x"])
    assert "meta" in oc.coverage(program, torch.ones(4), mesh).error.lower()
    assert oc.coverage(program, torch.ones(4), mesh, meta=False).error == ""


def test_plain_models_need_a_mesh():
    with pytest.raises(LayoutError, match="ProcessMesh"):
        oc.coverage(Mlp(), torch.ones(8, 16))
    with pytest.raises(LayoutError, match="2 entries in input_placements for 1"):
        oc.coverage(Mlp(), torch.ones(8, 16), grid(), None, [[S(0), R()], None])


@torch.library.custom_op("sweeptest::scale_rows", mutates_args=())
def scale_rows(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return x * s[:, None]


@torch.library.custom_op("sweeptest::scale_rows_backward", mutates_args=())
def scale_rows_backward(grad: torch.Tensor, x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return grad * s[:, None], (grad * x).sum(1)


scale_rows.register_fake(lambda x, s: torch.empty_like(x))
scale_rows_backward.register_fake(lambda grad, x, s: (torch.empty_like(x), torch.empty_like(s)))
scale_rows.register_autograd(
    lambda ctx, grad: scale_rows_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def sample():
    return scale_rows(
        torch.randn(5, 3, dtype=torch.float64, requires_grad=True),
        torch.randn(5, dtype=torch.float64, requires_grad=True),
    )


FORWARD = ("sweeptest::scale_rows", "n d, n -> n d")
BACKWARD = ("sweeptest::scale_rows_backward", "n d, n d, n -> n d @0 2, n @0 1")


@pytest.fixture
def clean():
    yield
    for name in (FORWARD[0], BACKWARD[0]):
        rows.pop(name, None)


@pytest.mark.usefixtures("clean")
def test_a_rule_is_proved():
    assert oc.register_rule(scale_rows, FORWARD[1], linear="x * s", verify=[sample]) is scale_rows
    oc.register_rule(*BACKWARD, linear="grad", verify=[sample])
    assert {FORWARD[0], BACKWARD[0]} <= set(rows)


@pytest.mark.usefixtures("clean")
def test_a_wrong_rule_is_refused_with_its_layouts():
    with pytest.raises(RuleError, match=r"(?s)wrong on a mesh of 2 ranks.*scale_rows.*layouts .*Partial"):
        oc.register_rule(*FORWARD, linear="x + s", verify=[sample])
    assert FORWARD[0] not in rows
    with pytest.raises(RuleError, match=r"layouts .*Shard"):
        oc.register_rule(BACKWARD[0], "n d, n d, n -> n d, n", reduce="max", verify=[sample])


@pytest.mark.usefixtures("clean")
def test_mistakes():
    with pytest.raises(RuleError, match="no operator"):
        oc.register_rule("sweeptest::absent", "a -> a")
    with pytest.raises(RuleError, match="no such trait: linar"):
        oc.register_rule(*FORWARD, linar="x")
    with pytest.raises(RuleError):
        oc.register_rule(FORWARD[0], "n d, n -> (n")
    with pytest.raises(RuleError, match="does not call"):
        oc.register_rule(*FORWARD, verify=[lambda: torch.ones(2)])
    oc.register_rule(*FORWARD)
    with pytest.raises(RuleError, match="replace=True"):
        oc.register_rule(*FORWARD)
    oc.register_rule(*FORWARD, replace=True)


@pytest.mark.usefixtures("clean")
def test_as_a_decorator():
    @oc.register_rule("sweeptest::scale_rows", verify=[sample])
    def rule(call):
        assert call.x.shape == (5, 3)
        return "n d, n -> n d"

    assert rows["sweeptest::scale_rows"].form.__wrapped__ is rule


@multirank(2)
def test_a_custom_operator_forward_and_backward():
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    s = torch.arange(1.0, 6.0).requires_grad_()
    scale_rows(x, s).square().sum().backward()
    mesh = oc.ProcessMesh([0, 1], ["x"])

    def twins():
        return [oc.shard_tensor(t.detach(), mesh, [S(0)], requires_grad=True) for t in (x, s)]

    with pytest.warns(oc.GatheredOperatorWarning, match="scale_rows"):
        a, b = twins()
        scale_rows(a, b)
    oc.register_rule(*FORWARD, linear="x * s")  # what was decided before is forgotten
    oc.register_rule(*BACKWARD)
    a, b = twins()
    with oc.no_implicit_communication():
        y = scale_rows(a, b)
        y.square().sum(1).backward(torch.ones(5))
    assert y.placements == (S(0),)
    assert_close([y, a.grad, b.grad], [scale_rows(x, s).detach(), x.grad, s.grad])
