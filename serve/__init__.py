"""The HTTP server: OpenAI's and Anthropic's APIs over an engine."""
