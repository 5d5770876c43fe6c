"""What a recording takes, without running it."""
