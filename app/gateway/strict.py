"""What every typed body is based on."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Types are strict, "1" is no number; unknown fields are ignored, and nobody changes one later."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)
