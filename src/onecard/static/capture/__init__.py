"""Running a step once while it is written down."""
