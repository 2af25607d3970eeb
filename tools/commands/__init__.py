"""Commands of gristmill, a file for each."""
