"""The shared-memory backend: collectives between the processes of one host, on CPU tensors.

A backend of torch.distributed named "shm": ``dist.init_process_group("shm")``, or ``"cpu:shm,cuda:nccl"``, as soon as
onecard is imported. Everything that torch builds on process groups (DDP, FSDP2, DTensor, pipelining) runs on it.
"""

from onecard.comm.shm.backend import available, register

__all__ = ["available", "register"]

register()
