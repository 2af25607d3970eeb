"""The products of all experts in one call."""
