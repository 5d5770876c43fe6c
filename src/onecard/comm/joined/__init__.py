"""All ranks of a world in one process: a thread for each, of which one runs at a time; what they send is handed over."""
