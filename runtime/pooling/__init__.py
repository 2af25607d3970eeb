"""Embeddings and scores: sentence-transformers directories, poolers, and the engine that runs whole sequences in batches."""
