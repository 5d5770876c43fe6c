"""Random training programs, on plain torch and on a mesh: ``make fuzz``. A seed is a program, everywhere the same."""
