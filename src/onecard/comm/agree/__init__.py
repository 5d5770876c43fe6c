"""Whether ranks agree: on what they say, send and hold."""
