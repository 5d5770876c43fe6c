"""What a device and its links take. Pure."""
