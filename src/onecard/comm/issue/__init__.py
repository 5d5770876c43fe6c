"""Messages: process groups, collectives, sends and receives, now or started."""
