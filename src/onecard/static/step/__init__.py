"""One recorded step as data: nodes, memory, order."""
