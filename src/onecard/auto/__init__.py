"""A plan applied to a program that was written for one card: its model, its optimizers and its batches, in place."""
