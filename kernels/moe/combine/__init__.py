"""The weighted sum of the experts of each token."""
