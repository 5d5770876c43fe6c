"""Schedules as data: made, proved, priced and drawn before anything runs. Pure."""
