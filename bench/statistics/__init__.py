"""Statistics of noisy samples: verdicts on pairs, interleaved rounds, the noise floor of a machine."""
