"""A mixture of experts as one operation."""
