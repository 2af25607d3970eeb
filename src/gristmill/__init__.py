"""gristmill: LLM inference kernels, chosen by measurement and verified on the device at hand."""

__version__ = "0.1.0"
