"""A checkpoint on disk: files, index, tree, objects by name."""
