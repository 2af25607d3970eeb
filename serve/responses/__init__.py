"""OpenAI's responses API: requests, events, and the responses that are kept."""
