"""Boxes against masks of whole tensors: what is in common, what is clipped, cut and seen inside a part."""

import random

import torch

from onecard import ProcessMesh
from onecard.place import boxes
from onecard.place.layout import Layout


def draw(r: random.Random, shape: tuple[int, ...]) -> boxes.Box:
    return tuple(tuple(sorted(r.choices(range(n + 1), k=2))) for n in shape)


def mask(box: boxes.Box, shape: tuple[int, ...]) -> torch.Tensor:
    made = torch.zeros(shape, dtype=torch.bool)
    made[boxes.slices(box)] = True
    return made


def test_boxes_are_what_masks_of_the_whole_say():
    r, seen = random.Random(0), {"apart": 0, "met": 0, "split": 0}
    for _ in range(300):
        shape = tuple(r.randrange(1, 6) for _ in range(r.randrange(4)))
        whole, a, held = torch.arange(torch.Size(shape).numel()).view(shape), draw(r, shape), draw(r, shape)
        both = mask(a, shape) & mask(held, shape)
        met, clipped = boxes.meet(a, held), boxes.clip(a, held)
        assert boxes.volume(a) == mask(a, shape).sum() and boxes.shape_of(a) == whole[boxes.slices(a)].shape
        assert boxes.volume(clipped) == both.sum() and all(
            h[0] <= c[0] <= c[1] <= h[1] for c, h in zip(clipped, held, strict=True)
        )
        assert (met is None) == (not both.any()) and met in (None, clipped)
        part = whole[boxes.slices(held)]
        assert sorted(boxes.view(part, held, clipped).flatten().tolist()) == whole[both].tolist()
        pieces = boxes.split(a, r.randrange(1, 5))
        count = sum((mask(p, shape).int() for p in pieces), torch.zeros(shape, dtype=torch.int))
        assert torch.equal(count, mask(a, shape).int())
        seen["apart" if met is None else "met"] += 1
        seen["split"] += len(pieces) > 1
    assert min(seen.values()) > 50, seen  # every case came up


def test_a_layout_gives_each_rank_a_box_and_all_boxes_are_the_whole():
    mesh = ProcessMesh([[0, 1, 2], [3, 4, 5]], ["x", "y"])
    for dims in (((0,), (1,)), ((1, 0), ()), ((), (0, 1)), ((), ())):
        layout, count = Layout.make(mesh, dims), torch.zeros(7, 5, dtype=torch.int)
        for rank in mesh.process_ids:
            place = mesh.coordinate(rank)
            box = layout.box((7, 5), place)
            assert boxes.slices(box) == layout.local_slices((7, 5), place)
            assert boxes.shape_of(box) == layout.local_shape((7, 5), place)
            count[boxes.slices(box)] += 1
        copies = 6 // torch.Size([mesh.shape[a] for axes in dims for a in axes] or [1]).numel()
        assert (count == copies).all()
