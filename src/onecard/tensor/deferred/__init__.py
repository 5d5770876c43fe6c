"""Models built without memory: what was called is written down, and each rank makes its part."""
