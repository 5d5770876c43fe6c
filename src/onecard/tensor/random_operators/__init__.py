"""Operators that draw: each rank draws the numbers of its part of the whole."""
