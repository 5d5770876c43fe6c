"""Everything that talks to another process: the world, groups of mesh axes, collectives, and who watches them."""

from onecard.comm.issue.groups import Group, from_device_mesh, group, to_device_mesh
from onecard.comm.world.world import device, get_rank, get_world_size, init

__all__ = ["Group", "device", "from_device_mesh", "get_rank", "get_world_size", "group", "init", "to_device_mesh"]
