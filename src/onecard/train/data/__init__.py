"""Data loaders of several ranks."""
