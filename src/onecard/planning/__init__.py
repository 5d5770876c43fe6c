"""What a program would take, known before it runs."""
