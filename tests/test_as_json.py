"""Meshes, layouts and specs as JSON: what is written is read again, and what does not fit is refused in words."""

from __future__ import annotations

import copy
import json
from math import prod
from typing import Any

import pytest
import torch
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st

import onecard as oc
from onecard.errors import OnecardError
from onecard.place.layout import REDUCTIONS, Layout
from onecard.place.parts import Part
from onecard.tensor.spec import COPY, Spec

MESH = oc.ProcessMesh([[4, 0], [2, 3]], ["dp", "tp"])
MERGED = Layout.make(MESH, ((Part(3, ()), Part(4, (1,))), ()), ((0, "sum"),))
SPEC = Spec.make(MERGED, torch.Size([12, 5]), (5, 1), torch.bfloat16, torch.device("cuda", 1))


def again(value: Any) -> Any:
    return oc.from_json(json.loads(json.dumps(oc.to_json(value))))


@st.composite
def meshes(draw: st.DrawFn) -> oc.ProcessMesh:
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    ranks = draw(st.permutations(range(prod(shape) + 2)))[: prod(shape)]
    names = draw(st.lists(st.text(min_size=1, max_size=5), min_size=len(shape), max_size=len(shape), unique=True))
    return oc.ProcessMesh(torch.tensor(ranks).view(shape), names)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Any layout: axes in any order on dims and on parts of dims, or pending, or idle."""
    mesh = draw(meshes())
    shape, places = [], []
    for _ in range(draw(st.integers(0, 4))):
        sizes = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
        shape.append(prod(sizes))
        places.append([(size, []) for size in sizes])
    op, pending = draw(st.sampled_from([*REDUCTIONS, "norm2.0"])), []
    slots = [axes for dim in places for _, axes in dim]
    for axis in draw(st.permutations(range(mesh.ndim))):
        where = draw(st.integers(-2, len(slots) - 1))
        if where == -2:
            pending.append((axis, op))
        elif where >= 0:
            slots[where].append(axis)
    dims = [
        tuple(Part(n, tuple(axes)) for n, axes in dim) if len(dim) > 1 else tuple(dim[0][1]) for dim in places
    ]  # fmt: skip
    layout = Layout.make(mesh, tuple(dims), tuple(sorted(pending)))
    stride = tuple(draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape))))
    dtype = draw(st.sampled_from([torch.float32, torch.bool, torch.complex64, torch.int8]))
    return Spec.make(layout, torch.Size(shape), stride, dtype, torch.device("cpu"))


@pytest.mark.proof
@settings(deadline=None, max_examples=amount(30, 100))
@given(specs())
def test_what_is_written_is_read_again(spec: Spec) -> None:
    assert again(spec) is spec
    assert again(spec.layout) is spec.layout
    assert again(spec.layout.mesh) is spec.layout.mesh


def test_the_form() -> None:
    """The form is a promise: a change needs another version."""
    mesh = {"onecard": "ProcessMesh", "version": 1, "ranks": [[4, 0], [2, 3]], "axes": ["dp", "tp"]}
    parts = [{"size": 3, "axes": []}, {"size": 4, "axes": ["tp"]}]
    layout = {"onecard": "Layout", "version": 1, "mesh": mesh, "dims": [parts, []], "pending": [["dp", "sum"]]}
    spec = {"layout": layout, "shape": [12, 5], "stride": [5, 1], "dtype": "bfloat16", "device": "cuda:1"}
    assert oc.to_json(SPEC) == {"onecard": "Spec", "version": 1, **spec}
    assert again(SPEC.with_alias(COPY).with_hint((1,))) is SPEC


DROP = "<leave it out>"
# Where in the JSON of SPEC, what stands there instead, and what the error says.
FAULTS: list[tuple[tuple[Any, ...], Any, str]] = [
    ((), [], "want an object with the key 'onecard'"),
    (("onecard",), "Tensor", "'onecard' is 'Tensor', want ProcessMesh or Layout or Spec"),
    (("onecard",), DROP, "'onecard' is None"),
    (("version",), 2, "Spec of version 2, but this onecard reads version 1"),
    (("version",), True, "Spec of version True"),
    (("layout", "version"), "1", "layout: Layout of version '1'"),
    (("layout", "mesh", "version"), DROP, "layout.mesh: ProcessMesh of version None"),
    (("stride",), DROP, "Spec lacks ['stride']"),
    (("layout", "extra"), 0, "layout: Layout has unknown keys ['extra']"),
    (("layout", "onecard"), "ProcessMesh", "layout: 'onecard' is 'ProcessMesh', want Layout"),
    (("layout", "mesh", "ranks"), [[0, 0], [1, 2]], "rank 0 stands in it more than once"),
    (("layout", "mesh", "ranks"), [[0], [1, 2]], "rows have different lengths"),
    (("layout", "mesh", "ranks"), [["0", 1], [2, 3]], "layout.mesh.ranks: want nested lists of ranks, not '0'"),
    (("layout", "mesh", "ranks"), [[-1, 1], [2, 3]], "layout.mesh.ranks: want nested lists of ranks, not -1"),
    (("layout", "mesh", "ranks"), 10**30, "layout.mesh.ranks: want nested lists of ranks"),
    (("layout", "mesh", "axes"), ["dp", 1], "layout.mesh.axes: want a list of axis names"),
    (("layout", "mesh", "axes"), ["dp", "dp"], "needs 2 different axis names"),
    (("layout", "dims"), 3, "layout.dims: want a list with an entry for each dim"),
    (("layout", "dims", 0), "tp", "layout.dims[0]: want a list of axis names, or of parts"),
    (("layout", "dims", 0), [{"size": 12, "axes": ["tp"]}], "layout.dims[0]: want at least two parts"),
    (("layout", "dims", 0, 0, "size"), -3, "layout.dims[0]: want parts {'size': number, 'axes': [names]}"),
    (("layout", "dims", 0, 0, "size"), 4, "shape: dim 0 has 12 elements, but its parts [4, 4] make others"),
    (("layout", "dims", 0, 0), "dp", "layout.dims[0]: want parts"),
    (("layout", "dims", 1), ["pp"], "layout.dims[1]: the mesh has no axis 'pp'; its axes are ['dp', 'tp']"),
    (("layout", "dims", 1), ["tp"], "layout.dims[1]: axis 'tp' comes twice"),
    (("layout", "pending"), [["tp", "sum"]], "layout.pending: axis 'tp' comes twice"),
    (("layout", "pending"), [["dp", "mean"]], "layout.pending: there is no reduction 'mean'"),
    (("layout", "pending"), ["dp"], "layout.pending: want a list of [axis name, reduction]"),
    (("shape",), [12], "shape: want 2 numbers, one for each dim of the layout"),
    (("shape", 1), 5.0, "shape: want 2 numbers"),
    (("dtype",), "float33", "dtype: want a dtype of torch such as 'float32', not 'float33'"),
    (("dtype",), "nn", "dtype: want a dtype of torch"),
    (("device",), "gpu", "device: want a device such as 'cpu' or 'cuda:0', not 'gpu'"),
    (("device",), 0, "device: want a device"),
]


@pytest.mark.parametrize(("path", "value", "words"), FAULTS, ids=lambda x: None if isinstance(x, str) else repr(x))
def test_what_does_not_fit_is_refused(path: tuple[Any, ...], value: Any, words: str) -> None:
    data: Any = copy.deepcopy(oc.to_json(SPEC))
    holder = data
    for step in path[:-1]:
        holder = holder[step]
    if not path:
        data = value
    elif value is DROP:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    with pytest.raises(OnecardError) as error:
        oc.from_json(data)
    assert str(error.value).startswith("from_json: ") and words in str(error.value)


def test_reductions_that_do_not_commute_and_other_values() -> None:
    data = oc.to_json(Layout.replicated(MESH, 1))
    with pytest.raises(OnecardError, match="may be done in any order"):
        oc.from_json({**data, "pending": [["dp", "sum"], ["tp", "max"]]})
    with pytest.raises(OnecardError, match="want a ProcessMesh, a Layout, a Spec or a Machine, not Tensor"):
        oc.to_json(torch.ones(1))  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3), lambda s: st.lists(s, max_size=3)))
def test_any_rubbish_is_refused_in_words_or_means_something(rubbish: Any) -> None:
    for path in (("layout",), ("layout", "mesh"), ("layout", "dims"), ("layout", "pending"), ("shape",), ("dtype",)):
        data: Any = oc.to_json(SPEC)
        holder = data
        for step in path[:-1]:
            holder = holder[step]
        holder[path[-1]] = rubbish
        try:
            found = oc.from_json(data)
        except OnecardError as error:
            assert str(error).startswith("from_json: ")
        else:
            assert path[-1] in ("dims", "pending") and again(found) is found
