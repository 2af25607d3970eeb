"""`gristmill bench serve`: load on a server of OpenAI's API, and what its clients see. It knows nothing of the server, so it measures any."""
