"""Merging partial attention results."""
