"""Gradients of a fleet program: summed, counted, clipped."""
