"""Replaying a recording on a program, and checking that it still says what the program does."""
