"""What a recording has to notice, and what it need not: programs of another mode, tied tensors, settings of layers, batches."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import replays_only
from torch import Tensor, nn

import onecard as oc
from onecard.errors import RecordingError

MESH = oc.ProcessMesh([0], ["dp"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Dropout(0.25))
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.b(self.a(self.body(x[:, None])))[:, None])


def trained() -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., Any]]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, step


def _mode(model: Any, optimizer: Any) -> None:
    model.eval()


def _dropout(model: Any, optimizer: Any) -> None:
    model.body[3].p = 0.5


def _activation(model: Any, optimizer: Any) -> None:
    model.body[1] = nn.GELU()


def _function(model: Any, optimizer: Any) -> None:
    model.layer.activation = F.gelu


def _stride(model: Any, optimizer: Any) -> None:
    model.body[0].dilation = (2,)


def _nesterov(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["nesterov"] = True


def _frozen(model: Any, optimizer: Any) -> None:
    model.a.weight.requires_grad_(False)


def _tied(model: Any, optimizer: Any) -> None:
    model.b.weight = model.a.weight


def _hook(model: Any, optimizer: Any) -> None:
    model.a.register_forward_hook(lambda module, given, result: 2 * result)


def _forward(model: Any, optimizer: Any) -> None:
    model.a.forward = lambda x: x


def _group(model: Any, optimizer: Any) -> None:
    params = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = params[::-1]


CHANGES = {
    _mode: r"model.training was True and is False",
    _dropout: r"model.body.3.p was 0.25 and is 0.5",
    _activation: r"the class of model.body.1 was '.*ReLU' and is '.*GELU'",
    _function: r"model.layer.activation was '.*relu' and is '.*gelu'",
    _stride: r"model.body.0.dilation was \[1\] and is \[2\]",
    _nesterov: r"optimizer.param_groups\[0\]\['nesterov'\] was False and is True",
    _frozen: r"requires_grad of the parameters of model.a\[0\]\[1\] was True and is False",
    _tied: r"the tensor model.b.weight is 'model.a.weight', which was not there",
    _hook: r"hooks of model.a was \[\] and is",
    _forward: r"model.a.forward was None and is",
    _group: r"parameters of optimizer.param_groups\[0\]\[0\] was 'model.body.0.weight' and is 'model.layer.norm2.bias'",
}


def test_a_file_carries_its_guards() -> None:
    model, optimizer, step = trained()
    step(torch.randn(3, 4))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.safetensors"
        oc.record(step)(torch.randn(3, 4)).save(path)
        loaded = oc.load_recording(path)
        for change, words in CHANGES.items():
            other, its, again = trained()
            again(torch.randn(3, 4))
            change(other, its)
            with pytest.raises(RecordingError, match=f"is another program .*{words}"):
                loaded.bind(model=other, optimizer=its)
        bound, batch = loaded.bind(model=model, optimizer=optimizer), torch.randn(3, 4)
        twin, its, again = trained()
        twin.load_state_dict(model.state_dict())
        its.load_state_dict(optimizer.state_dict())
        torch.manual_seed(5)
        expected = again(batch)
        torch.manual_seed(5)
        assert torch.equal(bound(batch), expected)
        with pytest.raises(RecordingError, match=r"torch\.no_grad"), torch.no_grad():
            bound(batch)


@pytest.mark.parametrize("change", [_function, _stride, _tied])
def test_changes_within_a_process_are_recorded_anew(change: Callable[..., None]) -> None:
    found = []
    for recorded in (False, True):
        model, optimizer, step = trained()
        model.body[3].p = 0.0
        run = oc.to_static(step) if recorded else step
        torch.manual_seed(1)
        batches = torch.randn(7, 3, 5)
        with warnings.catch_warnings(), replays_only():
            warnings.filterwarnings("ignore", message="step is recorded anew")
            losses = []
            for i, batch in enumerate(batches):
                if i == 4:
                    change(model, optimizer)
                losses.append(run(batch if change is _stride and i > 3 else batch[:, :4]))
        found.append([*losses, *model.parameters()])
    assert len(run.recordings) == 2  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_distributed_parameters_that_are_tied_or_exchanged_later() -> None:
    def losses(recorded: bool, change: Callable[[nn.Module], None]) -> list[Any]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
        for layer in model.values():
            layer.weight = nn.Parameter(oc.shard_tensor(layer.weight.detach(), MESH, [oc.Shard(0)]))

        def step(x: Tensor) -> Tensor:
            loss = model["b"](model["a"](x).tanh()).square().mean()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.5 * p.grad)
                    p.grad = None
            return loss.detach()

        run = oc.to_static(step) if recorded else step
        made = []
        with warnings.catch_warnings(), replays_only():  # the guards alone
            warnings.simplefilter("ignore")
            for i in range(6):
                if i == 3:
                    change(model)
                made.append(oc.unshard(run(torch.full((2, 4), 0.5 + i))))
        return [*made, *(oc.unshard(p.detach()) for p in model.parameters())]

    def tie(model: Any) -> None:
        model.b.weight = model.a.weight

    def exchange(model: Any) -> None:
        model.a.weight, model.b.weight = model.b.weight, model.a.weight

    def renew(model: Any) -> None:
        model.a.weight = nn.Parameter(2 * model.a.weight.detach())

    for change in (tie, exchange, renew):
        expected, found = losses(False, change), losses(True, change)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), change.__name__


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("laid_out", [False, True])
def test_an_encoder_in_evaluation_with_padding(laid_out: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu", norm_first=False)
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8)).eval()
    run = oc.to_static(lambda x, mask: encoder(x, src_key_padding_mask=mask))
    x, mask = torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
    masks = [copy.deepcopy(mask) for _ in range(9)]
    for i, each in enumerate(masks):
        each[i % 3, 1 + i % 4 :] = True
    masks[5][1, 0] = True  # not at the end: torch takes the other way, without zeros
    for i, each in enumerate(masks):
        with torch.no_grad():
            expected = encoder(x + i, src_key_padding_mask=each)
            given = [oc.shard_tensor(v, MESH, [oc.Shard(0)]) if laid_out else v for v in (x + i, each)]
            torch.testing.assert_close(oc.unshard(run(*given)) if laid_out else run(*given), expected)
    assert len(run.recordings) == 1
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    attend = oc.to_static(lambda x: attention(x, x, x)[0])
    with torch.no_grad():  # the same products in kernels of other shapes: equal to the bit on some processors only
        for i in range(6):
            torch.testing.assert_close(attend(x + i), attention(x + i, x + i, x + i)[0])


def compared(make: Callable[[], tuple[Any, Any, Any]], calls: int = 9) -> Any:
    """A step as it is and recorded, without a warning; returns what was recorded."""
    found = []
    for recorded in (False, True):
        torch.manual_seed(0)
        model, step, change = make()
        run = oc.to_static(step) if recorded else step
        for i in range(calls):
            run(torch.randn(6, 4) + i)
            change(i)
        found.append([*model.parameters(), *model.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return run


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "NAdam", "Adagrad"])
def test_a_learning_rate_that_is_a_tensor(kind: str) -> None:
    def make() -> Any:
        model = nn.Linear(4, 2)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=torch.tensor(0.1), foreach=False)

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return model, step, lambda i: optimizer.param_groups[0]["lr"].mul_(0.75)

    assert len(compared(make).recordings) == 1


def test_batch_norm_that_counts_its_batches() -> None:
    def make() -> Any:
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            model(x).pow(3).mean().backward()
            optimizer.step()

        return model, step, lambda i: None

    assert len(compared(make).recordings) == 1


def test_whether_gradients_exist_does_not_matter_where_they_are_dropped() -> None:
    def make() -> Any:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return model, step, lambda i: optimizer.zero_grad() if i % 2 else None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(compared(make).recordings) <= 2
    torch.manual_seed(0)
    model, step, _ = make()
    run = oc.to_static(step)
    for i in range(8):
        run(torch.randn(6, 4))
        if i > 2:
            model.zero_grad()
    assert len(run.recordings) == 1


def test_gradients_that_are_added_to_matter() -> None:
    def make() -> Any:
        model = nn.Linear(4, 2)

        def step(x: Tensor) -> None:
            model(x).square().mean().backward()

        def change(i: int) -> None:
            if i in (3, 5):
                model.zero_grad()

        return model, step, change

    with warnings.catch_warnings(), replays_only():
        warnings.simplefilter("ignore")
        found = []
        for recorded in (False, True):
            torch.manual_seed(0)
            model, step, change = make()
            run = oc.to_static(step) if recorded else step
            for i in range(8):
                run(torch.randn(6, 4))
                change(i)
            found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_batch_that_comes_again() -> None:
    """An operator hints on a batch of indices where their gradients are wanted; that is no other batch."""
    table = nn.Parameter(oc.shard_tensor(torch.randn(8, 4), MESH, [oc.Shard(0)]))

    def step(indices: Tensor) -> None:
        table.grad = None
        F.embedding(indices, table).square().sum().backward()
        with torch.no_grad():
            table.sub_(0.1 * table.grad)

    run = oc.to_static(step)
    batches = [oc.shard_tensor(torch.randint(0, 8, (5,)), MESH, [oc.Replicate()]) for _ in range(3)]
    for batch in (*batches, *batches, *batches):
        run(batch)
    assert len(run.recordings) == 1


def test_words_tell_what_looks_alike_apart() -> None:
    x, run = torch.randn(4, 4), oc.to_static(lambda given: given["a"] * 2 + given["b"])
    with torch.no_grad():
        for given in ({"a": x, "b": x + 1},) * 2:
            run(given)
        with pytest.warns(match=r"with strides \[4, 1\] and is a tensor \[4, 4\] float32 with strides \[1, 4\]"):
            run({"a": x.t(), "b": x + 1})
        with pytest.warns(match="without requires_grad and is a tensor .* with requires_grad"):
            run({"a": x.t(), "b": torch.ones(4, 4, requires_grad=True)})
        with pytest.warns(match="other keys or another order in a dict"):
            run({"b": x.t(), "a": torch.ones(4, 4, requires_grad=True)})
