"""Mixtures of experts: routers, the way of tokens to their experts and back, experts on several ranks."""
