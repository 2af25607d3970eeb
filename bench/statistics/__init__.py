"""Deciding from noisy samples: verdicts on pairs, rounds taken in turn, the noise floor of a machine."""
