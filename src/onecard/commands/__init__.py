"""The commands, one module for each; `front` has what they share, `listed` their names."""
