"""Rows of a dim that lie where data says: tokens at the ranks of their experts."""
