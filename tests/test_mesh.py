"""ProcessMesh: every documented behaviour and error. No process group is needed."""

import copy
import pickle

import numpy as np
import pytest
import torch

from onecard import ProcessMesh
from onecard.errors import MeshError, OnecardError
from onecard.testing import multirank


@pytest.fixture
def seed_mesh():
    """The mesh of the seeds: not in order, not from rank 0 on."""
    return ProcessMesh([[2, 4, 5], [0, 1, 3]], dim_names=["x", "y"])


@pytest.fixture
def as_rank(monkeypatch):
    return lambda rank: monkeypatch.setattr("onecard.place.mesh.rank_source", lambda: rank)


def test_attributes(seed_mesh):
    assert seed_mesh.shape == [2, 3]
    assert (seed_mesh.ndim, seed_mesh.size, len(seed_mesh)) == (2, 6, 2)
    assert seed_mesh.dim_names == ["x", "y"]
    assert seed_mesh.process_ids == [2, 4, 5, 0, 1, 3]
    assert [seed_mesh.get_dim_size(a) for a in ("x", "y", 0, -1)] == [2, 3, 2, 3]
    assert [seed_mesh.axis(a) for a in ("x", "y", 1, -2)] == [0, 1, 1, 0]
    assert 5 in seed_mesh
    assert 6 not in seed_mesh


def test_what_it_hands_out_is_a_copy(seed_mesh):
    seed_mesh.mesh[0, 0] = 9
    seed_mesh.shape.append(1)
    seed_mesh.dim_names.append("z")
    assert (seed_mesh.process_ids[0], seed_mesh.shape, seed_mesh.dim_names) == (2, [2, 3], ["x", "y"])


@pytest.mark.parametrize(
    "given", [[[0, 1], [2, 3]], ((0, 1), (2, 3)), np.arange(4).reshape(2, 2), torch.arange(4).view(2, 2)]
)
def test_is_made_from_any_nested_numbers(given):
    assert ProcessMesh(given) is ProcessMesh([[0, 1], [2, 3]], ["d0", "d1"])


def test_equal_meshes_are_one_object(seed_mesh):
    assert ProcessMesh([[2, 4, 5], [0, 1, 3]], ("x", "y")) is seed_mesh
    assert ProcessMesh(seed_mesh) is seed_mesh
    assert ProcessMesh(seed_mesh, ["a", "b"]).dim_names == ["a", "b"]
    assert copy.deepcopy(seed_mesh) is copy.copy(seed_mesh) is seed_mesh
    assert pickle.loads(pickle.dumps(seed_mesh)) is seed_mesh
    assert seed_mesh != ProcessMesh([[2, 4, 5], [0, 1, 3]], ["y", "x"])
    assert ProcessMesh([0, 1]) != ProcessMesh([[0, 1]])
    assert len({seed_mesh, ProcessMesh([[2, 4, 5], [0, 1, 3]], ["x", "y"]), ProcessMesh([0])}) == 2


def test_repr_and_str(seed_mesh):
    assert eval(repr(seed_mesh)) is seed_mesh
    assert str(seed_mesh) == "ProcessMesh(x=2, y=3)\n[[2 4 5]\n [0 1 3]]"


@pytest.mark.parametrize(
    ("mesh", "why"),
    [
        ([[0, 1], [2]], "rows have different lengths"),
        ([], "want a nested list of ranks"),
        (3, "want a nested list of ranks"),
        ([0.5, 1.5], "want a nested list of ranks"),
        ([True, False], "want a nested list of ranks"),
        ("01", "want a nested list of ranks"),
        ([0, -1], "rank -1 is negative"),
        ([[0, 1], [1, 2]], "rank 1 stands in it more than once"),
    ],
)
def test_ranks_that_cannot_be(mesh, why):
    with pytest.raises(MeshError, match=why):
        ProcessMesh(mesh)


@pytest.mark.parametrize("names", [["x"], ["x", "x"], ["x", "y", "z"], "x", []])
def test_names_that_do_not_fit_show_the_call_that_does(names):
    with pytest.raises(MeshError, match=r"needs 2 different axis names, not .* dim_names=\['d0', 'd1'\]"):
        ProcessMesh([[0, 1], [2, 3]], names)


def test_one_axis_may_be_named_by_a_string():
    assert ProcessMesh([0, 1], "dp").dim_names == ["dp"]


def test_errors_are_onecard_errors_and_value_errors():
    assert issubclass(MeshError, OnecardError)
    assert issubclass(MeshError, ValueError)


@pytest.mark.parametrize("axis", ["z", 2, -3])
def test_an_axis_that_is_not_there(seed_mesh, axis):
    with pytest.raises(MeshError, match=r"has no axis .*; its axes are \['x', 'y'\]"):
        seed_mesh.get_dim_size(axis)


# ---- sub-meshes


def test_sub_mesh_by_index():
    mesh = ProcessMesh(np.arange(12).reshape(2, 3, 2), ["a", "b", "c"])
    assert mesh[0] is ProcessMesh([[0, 1], [2, 3], [4, 5]], ["b", "c"])
    assert mesh[-1] is mesh[1]
    assert mesh[1, 2] is ProcessMesh([10, 11], ["c"])
    assert mesh[1, 2, 0] is ProcessMesh([10], ["c"])
    assert mesh[0][0][0] is ProcessMesh([0], ["c"])
    assert [sub.process_ids[0] for sub in mesh] == [0, 6]


def test_sub_mesh_by_slice_keeps_the_names_of_its_axes():
    mesh = ProcessMesh(np.arange(12).reshape(2, 3, 2), ["a", "b", "c"])
    assert mesh[:1] is ProcessMesh([[[0, 1], [2, 3], [4, 5]]], ["a", "b", "c"])
    assert mesh[:, 1] is ProcessMesh([[2, 3], [8, 9]], ["a", "c"])
    assert mesh[:, 0, 1] is ProcessMesh([1, 7], ["a"])
    assert mesh[:, ::2, 0] is ProcessMesh([[0, 4], [6, 10]], ["a", "b"])


@pytest.mark.parametrize("index", [2, (0, 3), (0, 0, 0), 1.5, [0, 1], None, True, (), slice(5, 9), ("x", 0)])
def test_a_sub_mesh_that_is_not_there(seed_mesh, index):
    with pytest.raises(MeshError, match=r"ProcessMesh\(\[\[2, 4, 5\]"):
        seed_mesh[index]


def test_sub_mesh_by_name_is_the_one_around_this_process(seed_mesh, as_rank):
    as_rank(1)
    assert seed_mesh["x"] is ProcessMesh([4, 1], ["x"])
    assert seed_mesh["y"] is ProcessMesh([0, 1, 3], ["y"])
    assert seed_mesh["x", "y"] is seed_mesh
    assert seed_mesh["y", "x"] is ProcessMesh([[2, 0], [4, 1], [5, 3]], ["y", "x"])
    as_rank(5)
    assert seed_mesh["x"] is ProcessMesh([5, 3], ["x"])


def test_sub_mesh_by_name_needs_this_process_in_it(seed_mesh, as_rank):
    as_rank(7)
    with pytest.raises(MeshError, match=r"rank 7 is not in .*so it has no sub-mesh \['x'\] of its own"):
        seed_mesh["x"]
    with pytest.raises(MeshError, match="has no axis 'z'"):
        seed_mesh["z"]


def test_get_mesh_with_dim():
    mesh = ProcessMesh(np.arange(12).reshape(2, 3, 2), ["a", "b", "c"])
    turned = mesh.get_mesh_with_dim("b")
    assert (turned.dim_names, turned.shape) == (["b", "a", "c"], [3, 2, 2])
    assert turned.process_ids[:4] == [0, 1, 6, 7]
    assert mesh.get_mesh_with_dim("a") is mesh
    assert mesh.get_mesh_with_dim("c", 1) is ProcessMesh([[1, 3, 5], [7, 9, 11]], ["a", "b"])
    with pytest.raises(MeshError, match="has no axis 'z'"):
        mesh.get_mesh_with_dim("z")


# ---- ranks


def test_coordinates(seed_mesh, as_rank):
    assert seed_mesh.coordinate(4) == (0, 1)
    assert seed_mesh.coordinate(6) is None
    as_rank(3)
    assert seed_mesh.coordinate() == (1, 2)


def test_the_rank_comes_from_the_launcher_unless_a_process_group_says_otherwise(monkeypatch):
    from onecard.place.mesh import _rank_from_environment

    monkeypatch.setenv("RANK", "3")
    assert _rank_from_environment() == 3
    monkeypatch.delenv("RANK")
    assert _rank_from_environment() == 0


def test_neighbours(seed_mesh, as_rank):
    assert seed_mesh.neighbours("x", 4) == [4, 1]
    assert seed_mesh.neighbours(1, 4) == [2, 4, 5]
    as_rank(0)
    assert seed_mesh.neighbours("x") == [2, 0]
    with pytest.raises(MeshError, match="rank 9 is not in"):
        seed_mesh.neighbours("x", 9)


@multirank(2)
def test_to_and_from_a_device_mesh():
    from torch.distributed.device_mesh import init_device_mesh

    from onecard.comm import from_device_mesh, to_device_mesh

    device_mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    mesh = ProcessMesh.from_device_mesh(device_mesh)
    assert mesh is from_device_mesh(device_mesh) is ProcessMesh([[0], [1]], ["dp", "tp"])
    back = to_device_mesh(mesh)
    assert (back.mesh.tolist(), back.mesh_dim_names) == ([[0], [1]], ("dp", "tp"))
