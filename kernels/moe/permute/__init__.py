"""Rows in the order of their experts."""
