"""A recording for people: text, pictures, timelines."""
