"""Programs on models: the gristmill command line, perplexity, and the calibration that quantizing with GPTQ and AWQ needs."""
