"""What of a program a recording depends on, and the function that asks for it."""
