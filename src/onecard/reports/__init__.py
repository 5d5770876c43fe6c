"""Reports for people: messages, operators."""
