"""Names of dtypes: the short ones that gristmill stores and prints, and the others that it accepts."""

from __future__ import annotations

from typing import Any, Final

TORCH_NAMES: Final[dict[str, str]] = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
    "int32": "int32",
    "int64": "int64",
    "uint8": "uint8",
}
"""Short name -> the attribute of torch. The short name is what problems, stores and result files hold."""

DTYPES: Final[tuple[str, ...]] = tuple(TORCH_NAMES)

ALIASES: Final[dict[str, str]] = {
    **{name: short for short, name in TORCH_NAMES.items()},
    **{name: name for name in TORCH_NAMES},
    "float": "fp32",
    "half": "fp16",
    "fp8_e4m3": "fp8",
    "fp8_e4m3fn": "fp8",
    "int": "int32",
    "long": "int64",
}


def canonical_dtype(dtype: object) -> str:
    """The short name of a dtype: ``bf16`` for ``"bf16"``, ``"bfloat16"``, ``"BF16"``, ``"torch.bfloat16"``, ``torch.bfloat16``.

    Raises:
        ValueError: a name or a torch.dtype that gristmill has no short name for.
        TypeError: neither a string nor a torch.dtype.
    """
    # A torch.dtype is recognized by its text: this package does not import torch.
    if not isinstance(dtype, str) and not str(dtype).startswith("torch."):
        raise TypeError(f"a dtype is a name such as 'bfloat16' or a torch.dtype, got {type(dtype).__name__}")
    short = ALIASES.get(str(dtype).lower().removeprefix("torch."))
    if short is None:
        known = ", ".join(sorted(ALIASES))
        raise ValueError(f"unknown dtype {str(dtype)!r}; known: {known}, and the torch.dtype of each")
    return short


class _Names(dict[Any, str]):
    """Short names of torch dtypes, each computed from its text at the first lookup."""

    def __missing__(self, dtype: Any) -> str:
        try:
            name = canonical_dtype(dtype)
        except ValueError:
            raise TypeError(
                f"dtype {dtype} is not supported; supported: {', '.join(sorted(DTYPES))}"
            ) from None
        self[dtype] = name
        return name


dtype_name = _Names().__getitem__
"""The short name of a torch dtype; TypeError if gristmill has none for it. A dictionary's own method: it is asked once or more
in every planned call."""
