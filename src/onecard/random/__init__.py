"""Random numbers that are a function of (key, index in the whole tensor). Pure: no mesh, no messages, only tensors."""

from onecard.random.key import Key, new_key
from onecard.random.laws import Law, law
from onecard.random.parts import fill
from onecard.random.permute import permutation

__all__ = ["Key", "Law", "fill", "law", "new_key", "permutation"]
