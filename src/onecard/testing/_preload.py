"""Imported once by the fork server: what every rank would otherwise import again, at seconds a time."""

import contextlib
import gc
import importlib

# `torch._dynamo` because the first `optimizer.step()` of a process imports it (0.9 s), whether it compiles or not.
for _name in ("numpy", "torch", "torch.distributed.tensor", "torch._dynamo", "onecard"):
    with contextlib.suppress(Exception):  # a rank that needs it shows the error with its own traceback
        importlib.import_module(_name)

# What has been imported stays. The collections of a rank would look at all of it, and copy its pages by looking.
gc.freeze()
with contextlib.suppress(Exception):
    importlib.import_module("onecard.static.guards.frozen").settle()  # a recording need not look through it
gc.collect()  # counts what is left, nothing: else a rank collects only when as much as a quarter of it all is new
