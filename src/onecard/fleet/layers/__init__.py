"""Parallel layers on plain local tensors."""
