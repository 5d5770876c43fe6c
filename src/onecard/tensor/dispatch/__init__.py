"""From an operator to what this rank runs and sends: looked up, built, or done without a rule."""
