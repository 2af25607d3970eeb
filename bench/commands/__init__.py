"""One module a kernelbench command."""
