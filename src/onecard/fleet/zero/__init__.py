"""ZeRO for local models."""
