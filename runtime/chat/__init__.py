"""Conversations: templates that make prompts of them, formats that make messages of outputs."""
