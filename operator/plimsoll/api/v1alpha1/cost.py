"""What GPUs cost, so that the status can say what tokens cost."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

from pydantic import Field

from plimsoll.api.v1alpha1.base import IntOrString, Model, Rules, matching
from plimsoll.api.v1alpha1.scalars import decimal
from plimsoll.core.forecast import Unknown

Price = Annotated[
    int | str,
    IntOrString(16, '3 or "2.50"'),
    Rules(
        decimal(
            "^[0-9]{1,9}([.][0-9]{1,6})?$",
            'must be above 0 and below a billion with at most 6 decimals, such as 3 or "2.50"',
            zero=False,
        )
    ),
]


class Cost(Model):
    """What GPUs cost. Only shown: decisions are made in GPU time."""

    gpu_hour: Price = Field(
        description='Price of one GPU for one hour, whole or as text with at most 6 decimals, such as "2.50".'
    )
    currency: Annotated[
        str,
        Field(max_length=8),
        Rules(matching("^[A-Z]{3}$", "must be a currency's three capital letters, such as USD")),
    ] = Field(default="USD", description="Currency of the price, as three capital letters (ISO 4217).")

    @property
    def gpu_hour_price(self) -> Decimal:
        """Of one GPU for one hour."""
        return Decimal(self.gpu_hour)

    def per_hour(self, gpus: int) -> float:
        """What so many GPUs cost in an hour."""
        return float(self.gpu_hour_price * gpus)

    def per_million_tokens(self, gpus: int, tokens_per_s: float) -> float | Unknown:
        """What a million tokens cost while so many GPUs make so many per second; Unknown while they make none."""
        if not tokens_per_s > 0:
            return Unknown("no tokens were made")
        return self.per_hour(gpus) / 3600 / tokens_per_s * 1e6

    def shown(self, amount: float) -> str:
        """An amount with its currency: `12.34 USD`, with more decimals where it is small: `0.0731 USD`."""
        decimals = 2 if amount >= 1 or amount == 0 else 4 if amount >= 0.01 else 6
        return f"{amount:.{decimals}f} {self.currency}"
