# What is built from kernels/native; `operations.cpp` there says what is in it.

from typing import Any

def __getattr__(name: str) -> Any: ...
