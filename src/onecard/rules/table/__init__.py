"""The rows, by family. Importing this package fills the registry."""

from importlib import import_module

from onecard.rules.registry import rows

NAMES = (
    "pointwise", "matmul", "grouped", "movement", "factory", "indexing", "scattering", "arrangement", "reduction", "softmax",
    "loss", "normalization", "batch_norm", "attention", "convolution", "resampling", "linalg",
    "fourier",
)  # fmt: skip
families: dict[str, list[str]] = {}
for _name in NAMES:
    _known = set(rows)
    import_module(f"{__name__}.{_name}")
    families[_name] = [op for op in rows if op not in _known]
