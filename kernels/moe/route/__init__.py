"""The choice of experts, and the order of rows by expert, in one operation."""
