"""A plain model in stages, its own loop around it: where its tensors lie, how values come to them, microbatches."""
