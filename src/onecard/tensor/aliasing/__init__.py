"""Tensors that share memory on one card share it on a mesh: views, copies that stand for views, writes to a part."""
