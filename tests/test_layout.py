"""Layout: the chunk rule, shards of any layout partition the tensor exactly, and every error."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from onecard import ProcessMesh
from onecard.errors import LayoutError, MeshError
from onecard.place.layout import Layout, check_placements
from onecard.place.parts import chunk

ONE = ProcessMesh([0, 1, 2], ["x"])
TWO = ProcessMesh([[0, 1, 2], [3, 4, 5]], ["dp", "tp"])


@st.composite
def layouts(draw, pending=()):
    """A mesh of one to three axes, a shape, and any layout of it, with the axes of a dim in any order."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=0, max_size=3)))
    mesh = ProcessMesh(np.arange(np.prod(sizes)).reshape(sizes), [f"a{i}" for i in range(len(sizes))])
    dims = [[] for _ in shape]
    held, pending = [], [draw(st.sampled_from(pending))] if pending else []
    for axis in draw(st.permutations(range(len(sizes)))):
        use = draw(st.sampled_from([None, *range(len(shape)), *pending]))
        if isinstance(use, str):
            held.append((axis, use))
        elif use is not None:
            dims[use].append(axis)
    return Layout.make(mesh, tuple(map(tuple, dims)), tuple(sorted(held))), shape


def coordinates(mesh):
    return list(np.ndindex(*mesh.shape))


# ---- sizes


@given(st.integers(0, 60), st.integers(1, 9))
def test_chunk_is_torch_chunk(size, parts):
    lengths = [len(part) for part in torch.arange(size).chunk(parts)] if size else []
    lengths += [0] * (parts - len(lengths))
    bounds = [chunk(size, parts, i) for i in range(parts)]
    assert [length for _, length in bounds] == lengths
    assert [start for start, _ in bounds] == [min(sum(lengths[:i]), size) for i in range(parts)]


@given(layouts(pending=("sum",)))
def test_shards_partition_the_tensor(case):
    layout, shape = case
    times = np.zeros(shape, dtype=int)
    for place in coordinates(layout.mesh):
        slices = layout.local_slices(shape, place)
        assert times[slices].shape == layout.local_shape(shape, place)
        assert [s.start for s in slices] == list(layout.local_offset(shape, place))
        times[slices] += 1
    cut = np.prod([layout.mesh.shape[a] for axes in layout.dims for a in axes], dtype=int)
    assert (times == layout.mesh.size // cut).all(), "each element is on one rank of each line of axes that cut"


@given(layouts())
def test_axes_on_a_dim_cut_in_their_order(case):
    layout, shape = case
    for place in coordinates(layout.mesh):
        for dim, axes in enumerate(layout.dims):
            part = torch.arange(shape[dim])
            for axis in axes:
                pieces = list(part.chunk(layout.mesh.shape[axis])) if len(part) else []
                pieces += [part[:0]] * (layout.mesh.shape[axis] - len(pieces))
                part = pieces[place[axis]]
            start, length = layout.bounds(shape, dim, place)
            assert part.tolist() == list(range(start, start + length))


def test_the_order_of_axes_matters():
    first, second = Layout.make(TWO, ((0, 1),)), Layout.make(TWO, ((1, 0),))
    assert first is not second
    assert [first.bounds((6,), 0, place)[0] for place in coordinates(TWO)] == [0, 1, 2, 3, 4, 5]
    assert [second.bounds((6,), 0, place)[0] for place in coordinates(TWO)] == [0, 2, 4, 1, 3, 5]
    assert [first.bounds((5,), 0, place) for place in coordinates(TWO)] == [
        (0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 0),
    ]  # fmt: skip


def test_a_rank_outside_the_mesh_holds_nothing(monkeypatch):
    layout = Layout.of(ONE, 2, [Shard(0)])
    monkeypatch.setattr("onecard.place.mesh.rank_source", lambda: 7)
    assert layout.local_shape((6, 4)) == layout.local_offset((6, 4)) == (0, 0)
    monkeypatch.setattr("onecard.place.mesh.rank_source", lambda: 2)
    assert (layout.local_shape((5, 4)), layout.local_offset((5, 4))) == ((1, 4), (4, 0))


# ---- making and asking


def test_of_placements():
    layout = Layout.of(TWO, 3, [Shard(-1), Partial()])
    assert (layout.dims, layout.pending, layout.ndim) == (((), (), (0,)), ((1, "sum"),), 3)
    assert layout.placements == (Shard(2), Partial())
    assert (layout.dim_of(0), layout.dim_of(1)) == (2, None)
    assert Layout.of(TWO, 1, [Shard(0), Shard(0)]).dims == ((0, 1),)
    assert Layout.of(ONE, 2, Shard(1)).dims == ((), (0,))
    assert Layout.of(ONE, 0, [Partial("max")]).pending == ((0, "max"),)


@given(layouts(pending=("sum", "max", "norm2.0")))
def test_placements_give_the_layout_back_up_to_order(case):
    layout, shape = case
    again = Layout.of(layout.mesh, len(shape), layout.placements)
    assert again.dims == tuple(tuple(sorted(axes)) for axes in layout.dims)
    assert again.pending == layout.pending
    assert again.is_replicated == all(p == Replicate() for p in layout.placements)


def test_reductions_that_do_not_commute_are_refused():
    text = "Partial('sum') on axis 'dp' and Partial('max') on axis 'tp' of one tensor: its value would depend on which"
    with pytest.raises(LayoutError, match=re.escape(text)) as caught:
        Layout.of(TWO, 1, [Partial(), Partial("max")])
    assert str(caught.value).endswith("for example [Partial('sum'), Replicate()]")
    assert Layout.of(TWO, 1, [Partial(), Partial("avg")]).pending == ((0, "sum"), (1, "avg"))


def test_equal_layouts_are_one_object():
    layout = Layout.of(TWO, 2, [Shard(0), Partial()])
    assert Layout.make(TWO, ((0,), ()), ((1, "sum"),)) is layout
    assert copy.deepcopy(layout) is copy.copy(layout) is pickle.loads(pickle.dumps(layout)) is layout
    assert Layout.of(TWO, 2, [Shard(0), Partial("avg")]) is not layout


def test_reduced():
    layout = Layout.of(TWO, 2, [Shard(0), Partial()])
    assert layout.reduced() is Layout.of(TWO, 2, [Shard(0), Replicate()])
    assert layout.reduced().reduced() is layout.reduced()
    assert not layout.reduced().is_replicated
    assert Layout.of(TWO, 2, [Partial(), Partial()]).reduced() is Layout.replicated(TWO, 2)


def test_repr_names_axes_and_a_swapped_order():
    assert repr(Layout.of(TWO, 2, [Shard(-2), Partial("max")])) == "dp=Shard(0), tp=Partial(max)"
    assert repr(Layout.make(TWO, ((1, 0),))) == "dp=Shard(0), tp=Shard(0), tp>dp"


def test_dims_mapping_of_paddle():
    assert Layout.of(TWO, 3, [None, "tp", "dp"]) is Layout.of(TWO, 3, [Shard(2), Shard(1)])
    assert Layout.of(TWO, 1, [None]) is Layout.replicated(TWO, 1)
    with pytest.raises(LayoutError, match="axis 'tp' cuts two dims"):
        Layout.of(TWO, 2, ["tp", "tp"])
    with pytest.raises(MeshError, match="has no axis 'mp'"):
        Layout.of(TWO, 2, [None, "mp"])


@pytest.mark.parametrize(
    ("mesh", "ndim", "placements", "why"),
    [
        (TWO, 2, [Shard(0)], r"1 placement\(s\) .* for a mesh with 2 axes .*for example \[Shard\(0\), Replicate\(\)\]"),
        (ONE, 2, [Shard(0), Partial()], r"2 placement\(s\) .* for example \[Shard\(0\)\]"),
        (TWO, 2, [], r"0 placement\(s\) .* \[Replicate\(\), Replicate\(\)\]"),
        (ONE, 2, [Shard(2)], r"on axis 'x': the tensor has 2 dim\(s\), so -2 to 1 are possible"),
        (ONE, 2, [Shard(-3)], "so -2 to 1 are possible"),
        (ONE, 0, [Shard(0)], r"so only Replicate\(\) or Partial\(\) fit"),
        (ONE, 1, [0], "0 is not a placement"),
        (ONE, 1, [Partial("add")], "want one of sum, avg, product"),
        ([0, 1], 1, [Shard(0)], r"want a ProcessMesh, not list \(\[0, 1\]\)"),
    ],
)
def test_placements_that_do_not_fit(mesh, ndim, placements, why):
    with pytest.raises(LayoutError, match=why):
        Layout.of(mesh, ndim, placements)


def test_a_placement_that_means_more_than_its_base_is_refused():
    class Masked(Partial):
        """As DTensor's: which elements count is not in the layout."""

    with pytest.raises(LayoutError, match="is not a placement"):
        check_placements(ONE, [Masked()])
