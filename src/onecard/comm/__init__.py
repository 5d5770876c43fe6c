"""Everything that talks to another process: the world, groups of mesh axes, collectives, and who watches them."""

from onecard.comm.groups import Group, from_device_mesh, group, to_device_mesh
from onecard.comm.world import device, init, rank, world_size

__all__ = ["Group", "device", "from_device_mesh", "group", "init", "rank", "to_device_mesh", "world_size"]
