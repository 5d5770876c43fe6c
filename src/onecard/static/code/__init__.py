"""A graph as a Python function."""
