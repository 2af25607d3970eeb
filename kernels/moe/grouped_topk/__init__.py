"""Routing: the experts of each token."""
