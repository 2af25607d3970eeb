"""Loading a model: its configuration, and the model on a device. `gristmill.quant.checkpoints` reads the files and the parameters."""
