"""Where the elements of a tensor are: meshes, layouts, boxes, reductions. Pure."""
