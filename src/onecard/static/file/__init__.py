"""What a recording is in a file, and back. A file is data: what it names is looked up in closed tables, and checked."""
