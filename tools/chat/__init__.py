"""`gristmill chat`: a conversation with a model in the terminal, or over pipes."""
