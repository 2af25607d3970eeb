"""Specs of weight layouts. Each module declares one LAYOUT and imports no torch; the code is in the module with an underscore."""
