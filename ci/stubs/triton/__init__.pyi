# Triton ships no types. What the host calls is typed here. A jitted function is written in a language that mypy does not
# know: its decorator takes it out of the check, and to its callers it is Any.
from typing import Any
from typing import no_type_check as jit

__all__ = ["cdiv", "jit", "next_power_of_2"]

def cdiv(x: int, y: int) -> int: ...
def next_power_of_2(n: int) -> int: ...
def __getattr__(name: str) -> Any: ...
