"""What onecard says to a stranger: errors that name the topic and the call that works, and reports that print."""

from __future__ import annotations

import re
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import onecard as oc
from onecard import errors
from onecard.comm.agree import check
from onecard.errors import CommunicationError, DispatchError, LayoutError, MeshError
from onecard.testing import multirank

MESH = oc.ProcessMesh([0, 1], ["x"])
ONE = oc.ProcessMesh([0], ["x"])


def sparse(kind: str) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch: beta, prototype
        x = torch.eye(4)
        return {
            "sparse_coo": x.to_sparse,
            "sparse_csr": x.to_sparse_csr,
            "sparse_csc": x.to_sparse_csc,
            "sparse_bsr": lambda: x.to_sparse_bsr((2, 2)),
            "nested": lambda: torch.nested.nested_tensor([x[0], x[1, :2]]),
        }[kind]()


@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "nested"])
def test_tensors_that_cannot_be_divided(kind: str) -> None:
    for call in (oc.shard_tensor, oc.from_local, oc.reshard):
        for data in (sparse(kind), nn.Parameter(sparse(kind))):
            with pytest.raises(
                LayoutError, match=rf"a {kind} tensor cannot be divided; make it dense first: onecard\.\w+\("
            ):
                call(data, ONE, [oc.Shard(0)])  # type: ignore[arg-type]


def test_meshes_say_what_works() -> None:
    with pytest.raises(MeshError, match=r"rank 0 stands in it more than once.*ProcessMesh\(\[0, 1\]\)"):
        oc.ProcessMesh([0, 0])
    with pytest.raises(MeshError, match=r"ProcessMesh\(range\(onecard\.get_world_size\(\)\)\)"):
        oc.ProcessMesh(2)
    with pytest.raises(
        CommunicationError, match=r"onecard\.ProcessMesh\(range\(onecard\.get_world_size\(\)\), \.\.\.\)"
    ):
        oc.shard_tensor([1.0, 2.0], MESH, [oc.Shard(0)])
    assert oc.ProcessMesh(range(oc.get_world_size())) is oc.ProcessMesh([0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int8])
def test_what_torch_refuses_gets_the_operator_its_tensors_and_the_line(dtype: torch.dtype) -> None:
    x = oc.shard_tensor(torch.randn(6, 3), ONE, [oc.Shard(0)])
    labels = oc.shard_tensor(torch.zeros(6, dtype=dtype), ONE, [oc.Shard(0)])
    loss = nn.functional.cross_entropy
    for step in (loss, oc.to_static(lambda x, target: loss(x, target))):
        with pytest.raises(RuntimeError, match=r"dtype|scalar type") as caught:
            step(x, labels)
        (note,) = caught.value.__notes__
        words = rf"in aten.nll_loss_forward\(self \[6, 3\] float32 x=Shard\(0\), target \[6\] {str(dtype)[6:]} x=Shard\(0\)\) at "
        assert re.search(rf"{words}.*test_words.py:\d+. Labels and indices are int64: target.long\(\)$", note), note
    loss(x, labels.long())
    with pytest.raises(IndexError, match="out of bounds") as caught:  # a program that is known already
        loss(x, labels.long() + 7)
    assert "int64:" not in caught.value.__notes__[0] and "target [6] int64 x=Shard(0)" in caught.value.__notes__[0]


def compiled() -> list[Any]:
    layer = oc.shard_layer(nn.Linear(4, 4), ONE)
    function = torch.compile(lambda x: x.relu() + 1, backend="eager")
    x = oc.shard_tensor(torch.ones(2, 4), ONE, [oc.Shard(0)])
    return [
        lambda: torch.compile(layer, backend="eager")(torch.ones(2, 4)),
        lambda: function(x),
        lambda: torch.export.export(layer, (torch.ones(2, 4),)),
    ]


def test_compilers_are_refused_in_few_lines() -> None:
    for call in compiled():
        with pytest.raises(
            DispatchError, match=r"cannot trace distributed tensors .*Leave torch\.compile out"
        ) as caught:
            call()
        said = "".join(traceback.format_exception(caught.value))
        assert "save" not in str(caught.value) and "local_map" in said
        assert len(traceback.extract_tb(caught.value.__traceback__)) < 25


@multirank(2)
def test_save_pretrained() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=8, n_head=2, vocab_size=12, n_positions=8, bos_token_id=1, eos_token_id=1
    )

    def cut(name: str, module: nn.Module, mesh: oc.ProcessMesh) -> None:
        if isinstance(module, nn.Embedding) and not isinstance(module.weight, oc.DistTensor):
            module.weight = oc.shard_tensor(module.weight, mesh, [oc.Shard(0)])  # type: ignore[assignment]

    torch.manual_seed(0)
    model = oc.shard_layer(transformers.GPT2LMHeadModel(config), MESH, cut)
    with tempfile.TemporaryDirectory() as path:
        with pytest.raises(DispatchError, match=r"(?i)gather on every rank and write on one") as caught:
            model.save_pretrained(path)
        assert "compile" not in str(caught.value)
        whole = {name: oc.unshard(x).contiguous() for name, x in model.state_dict().items()}  # as the error says
        if oc.get_rank() != 0:
            return
        model.save_pretrained(path, state_dict=dict(whole))
        again = transformers.GPT2LMHeadModel.from_pretrained(path)
        assert (Path(path) / "model.safetensors").exists()
        for name, tensor in again.state_dict().items():
            assert torch.equal(tensor, whole[name]), name
        assert again.lm_head.weight is again.transformer.wte.weight


def test_anybody_else_is_told_where_the_tensors_are() -> None:
    x = oc.shard_tensor(torch.ones(2), ONE, [oc.Shard(0)])
    with pytest.raises(DispatchError, match=r"to_local\(\) or x\.full_tensor\(\)"):
        x.__tensor_flatten__()


@multirank(2)
def test_libraries_that_call_collectives_are_told_what_to_leave_out() -> None:
    x = oc.shard_tensor(torch.ones(2), MESH, [oc.Shard(0)])
    names = {"__name__": "torchmetrics.utilities", "dist": torch.distributed}
    exec("def gather(x):\n    dist.all_reduce(x)", names)
    wrap = nn.parallel.DistributedDataParallel
    layer = oc.shard_layer(nn.Linear(2, 2), MESH)
    for call, of, hint in (
        (names["gather"], x, "sync_on_compute=False"),
        (wrap, layer, "DistributedDataParallel: leave it out"),
        (torch.distributed.all_reduce, x, ""),
    ):
        with pytest.raises(CommunicationError) as caught:
            call(of)  # type: ignore[operator]
        last = str(caught.value).rpartition("plain tensor")[2]
        assert (hint in last) and bool(hint) is bool(last)


@multirank(2)
def test_torchmetrics() -> None:
    """As the page says; where it is installed."""
    warnings.simplefilter("ignore", oc.GatheredOperatorWarning)
    torchmetrics = pytest.importorskip("torchmetrics")
    logits, target = torch.randn(10, 4, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 4
    lay_out = lambda x: oc.shard_tensor(x, MESH, [oc.Shard(0)])  # noqa: E731
    for kind, options in (
        ("MulticlassAccuracy", {}),
        ("MulticlassConfusionMatrix", {}),
        ("MulticlassAUROC", {"thresholds": None}),
    ):
        found = []
        for place in (lambda x: x, lay_out):
            metric = getattr(torchmetrics.classification, kind)(4, sync_on_compute=False, **options)
            for _ in range(2):
                metric.update(place(logits), place(target))
            found.append(oc.unshard(metric.compute()))
        torch.testing.assert_close(found[1], found[0])
    metric = torchmetrics.classification.MulticlassConfusionMatrix(4)  # as it is by itself
    metric.update(lay_out(logits), lay_out(target))
    assert metric.compute().sum() == len(target)


class Counted:
    """A metric as torchmetrics makes them: ``update`` is wrapped, states are plain, ``compute`` adds up those of all ranks."""

    def __init__(self) -> None:
        self.sync_on_compute, self.dist_sync_on_step, self._to_sync = True, False, True
        self.counts = torch.zeros(4)
        names: dict[str, Any] = {"__name__": "torchmetrics.metric"}
        exec("def wrap(self):\n def wrapped_func(x): self.counts += x.sum(0)\n return wrapped_func", names)
        self.update = names["wrap"](self)

    def compute(self) -> torch.Tensor:
        if self._to_sync:
            torch.distributed.all_reduce(self.counts)
        return self.counts


@multirank(2)
def test_a_state_of_a_metric_that_has_the_whole_batch_is_not_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(8.0).view(2, 4)
    monkeypatch.setitem(sys.modules, "torchmetrics.metric", ModuleType("torchmetrics.metric"))
    whole, parts = Counted(), Counted()
    whole.update(oc.shard_tensor(x, MESH, [oc.Shard(0)]))
    parts.update(
        oc.shard_tensor(x, MESH, [oc.Shard(0)]).to_local()
    )  # each rank's own, by the user's hand: torchmetrics adds
    for metric in (whole, parts):
        torch.testing.assert_close(metric.compute(), x.sum(0))


@multirank(2)
def test_tables_of_a_report_print() -> None:
    with oc.explain() as report:
        oc.shard_tensor(torch.ones(4, 4), MESH, [oc.Shard(0)]).full_tensor()
    for table in (report.table(), report.totals()):
        assert "all_gather" in str(table) and "object" not in str(table) and str(table) in str(report)


@multirank(2)
def test_the_check_shows_a_few_values_on_both_ranks() -> None:
    """Also on a rank that loses the other in the midst of comparing: what was sent for comparison is not shown."""
    check.enable()
    x = torch.arange(5000.0)
    x[4321] += oc.get_rank()
    lost = check._await

    def lose(store: Any, key: str, rank: int, ranks: Any, mine: Any) -> Any:
        if mine.call.startswith("values"):
            raise RuntimeError("Connection reset by peer")
        return lost(store, key, rank, ranks, mine)

    for fails in (False, True):
        if fails:
            check._await = lose
        with pytest.raises(CommunicationError) as caught:
            oc.shard_tensor(x, MESH, [oc.Replicate()])
        said = str(caught.value)
        assert len(said) < 1200, said
        assert ("another rank is gone" in said) is fails


VOCABULARY = Path(__file__).parents[1] / "docs" / "vocabulary.md"


def errors_table() -> str:
    """The errors of the vocabulary, as their docstrings say."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.OnecardError)]
    meanings = [str(kind.__doc__).splitlines()[0].replace("``", "`") for kind in kinds]
    rows = [f"| `{kind.__name__}` | {meaning} |" for kind, meaning in zip(kinds, meanings, strict=True)]
    return "\n".join(["| error | meaning |", "|---|---|", *rows])


def vocabulary() -> list[str]:
    text = VOCABULARY.read_text(encoding="utf-8").split("## Errors")[0]
    rows = re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)
    return [word.strip() for row in rows if row.strip() != "word" for word in row.split(",")]


def unused(words: list[str], texts: list[str]) -> list[str]:
    said = "\n".join(texts).lower()
    return [word for word in words if not re.search(rf"\b{re.escape(word.lower())}(e?s|ed|d)?\b", said)]


def test_the_vocabulary_is_that_of_the_errors_and_the_pages() -> None:
    page = VOCABULARY.read_text(encoding="utf-8")
    assert page.split("<!-- errors -->")[1].split("<!-- end -->")[0].strip() == errors_table(), (
        f"in docs/vocabulary.md stands:\n{errors_table()}"
    )
    words = vocabulary()
    assert len(words) > 40 and len(set(words)) == len(words)
    pages = [p.read_text(encoding="utf-8") for p in VOCABULARY.parent.rglob("*.md") if p != VOCABULARY]
    assert unused(words, pages) == []
    assert unused(["mesh", "flurb"], pages) == ["flurb"]
