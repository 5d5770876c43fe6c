"""Writing a checkpoint: meet, write, meet, commit."""
