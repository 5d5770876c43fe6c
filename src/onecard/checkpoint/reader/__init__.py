"""Reading a checkpoint, of onecard's format or another."""
