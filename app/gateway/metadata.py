"""What clients note on their objects."""

from typing import Annotated

from pydantic import Field

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
