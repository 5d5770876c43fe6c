"""The version, which files of checkpoints carry."""

__version__ = "0.1.0"
