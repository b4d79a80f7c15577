"""Which requests are let in, held or sent away, by the model that sizes the fleet, and whose turn it is. Pure."""

from plimsoll.core.admission.gate import Gate, Outlook
from plimsoll.core.admission.limits import ClassPolicy, Limits, Need, limits
from plimsoll.core.admission.outcome import Decision, Outcome, Request, Told
from plimsoll.core.admission.quota import TenantPolicy
from plimsoll.core.admission.shares import Ledger, split

__all__ = [
    "ClassPolicy",
    "Decision",
    "Gate",
    "Ledger",
    "Limits",
    "Need",
    "Outcome",
    "Outlook",
    "Request",
    "TenantPolicy",
    "Told",
    "limits",
    "split",
]
