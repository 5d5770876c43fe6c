"""prove: all ranks of a program in one process, held against one card value by value."""
