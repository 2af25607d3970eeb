"""What exists, what it needs, and which to run. Standard library only: importing it touches neither torch nor a device."""
