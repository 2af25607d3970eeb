"""Result files as one page that needs no network."""
