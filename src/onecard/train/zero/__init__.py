"""Optimizers on distributed parameters: sums of gradients, ZeRO, master weights, resuming."""
