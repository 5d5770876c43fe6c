"""What of torch is private, and may change: each name in one place."""
