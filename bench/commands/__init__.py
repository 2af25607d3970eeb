"""One module per kernelbench command."""
