"""The kernelbench command line."""
