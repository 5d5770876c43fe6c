"""This process among the others: rank, device, hosts, who has ended, and pretended worlds."""
