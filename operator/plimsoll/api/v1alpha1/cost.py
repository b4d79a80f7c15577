"""`spec.cost`: the price of GPUs, from which the status computes the price of tokens."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

from pydantic import Field

from plimsoll.api.v1alpha1.api_model import ApiModel, IntOrString, ValidationRules, matching
from plimsoll.api.v1alpha1.scalars import decimal_rule
from plimsoll.core.types import Unavailable

Price = Annotated[
    int | str,
    IntOrString(16, '3 or "2.50"'),
    ValidationRules(
        decimal_rule(
            "^[0-9]{1,9}([.][0-9]{1,6})?$",
            'must be above 0 and below a billion with at most 6 decimals, such as 3 or "2.50"',
            allow_zero=False,
        )
    ),
]


class CostSpec(ApiModel):
    """Price of GPUs. It appears in the status only; scaling decisions use GPU time."""

    gpu_hour: Price = Field(
        description="Price of one GPU for one hour: an integer, or a string with at most 6 decimals: quote it, as in "
        '"2.50".'
    )
    currency: Annotated[
        str,
        Field(max_length=8),
        ValidationRules(
            matching("^[A-Z]{3}$", "must be an ISO 4217 currency code of three capital letters, such as USD")
        ),
    ] = Field(default="USD", description="Currency of the price: ISO 4217 code of three capital letters.")

    @property
    def gpu_hour_price(self) -> Decimal:
        """Price of one GPU for one hour."""
        return Decimal(self.gpu_hour)

    def per_hour(self, gpus: int) -> float:
        """Return the price of `gpus` GPUs for one hour."""
        return float(self.gpu_hour_price * gpus)

    def per_million_tokens(self, gpus: int, tokens_per_s: float) -> float | Unavailable:
        """Return the price of a million tokens; Unavailable if `tokens_per_s` is not positive."""
        if not tokens_per_s > 0:
            return Unavailable("no output tokens were generated")
        return self.per_hour(gpus) / 3600 / tokens_per_s * 1e6

    def per_request(self, gpus: int, requests_per_s: float) -> float | Unavailable:
        """Return the price of a request; Unavailable if `requests_per_s` is not positive."""
        if not requests_per_s > 0:
            return Unavailable("no request was served")
        return self.per_hour(gpus) / 3600 / requests_per_s

    def format_amount(self, amount: float) -> str:
        """Format an amount with its currency: `12.34 USD`, or with more decimals if it is small: `0.0731 USD`."""
        decimals = 2 if amount >= 1 or amount == 0 else 4 if amount >= 0.01 else 6
        return f"{amount:.{decimals}f} {self.currency}"
