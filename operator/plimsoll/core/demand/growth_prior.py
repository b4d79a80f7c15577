"""Prior for services without history: how often load grows by which factor within a start-up time.

Problem: standby replicas are worth what the next level shift would cost without them, and a new service has seen none.

Idea: the share of minutes from which load grows by more than a factor, over five week-long series of other services.
`bench/forecast/growth_prior.py` generates this module, and has method and definitions. The only sources are:
- Office 365 workloads A and D, prompt tokens a minute, from the figures of SageServe
  (https://github.com/shashwatj07/SageServe, MIT licence);
- BurstGPT, first week, tokens a minute (https://github.com/HPMLL/BurstGPT, CC-BY-4.0).
"""

from __future__ import annotations

from typing import Final

GROWTH_HORIZONS_S: Final = (60.0, 120.0, 240.0, 600.0)
GROWTH_FACTORS: Final = (1.05, 1.1, 1.2, 1.35, 1.6, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0)

# PRIOR_EXCEEDANCE[h][k]: share of minutes from which load grows past GROWTH_FACTORS[k] within GROWTH_HORIZONS_S[h].
PRIOR_EXCEEDANCE: Final = (
    (0.3838, 0.3243, 0.2420, 0.1667, 0.1012, 0.0530, 0.0299, 0.0199, 0.0101, 0.0039, 0.0009),
    (0.5750, 0.5011, 0.3876, 0.2782, 0.1727, 0.0931, 0.0546, 0.0360, 0.0186, 0.0070, 0.0019),
    (0.7519, 0.6762, 0.5506, 0.4150, 0.2738, 0.1576, 0.0931, 0.0618, 0.0326, 0.0126, 0.0035),
    (0.8937, 0.8455, 0.7378, 0.6052, 0.4397, 0.2757, 0.1707, 0.1165, 0.0642, 0.0263, 0.0086),
)

# PRIOR_WEIGHT_S[h][k]: seconds of own history that weigh as much as the prior for growth past GROWTH_FACTORS[k].
PRIOR_WEIGHT_S: Final = (
    (710.0, 710.0, 710.0, 710.0, 710.0, 710.0, 830.0, 1010.0, 1660.0, 4010.0, 20860.0),
    (900.0, 900.0, 900.0, 900.0, 900.0, 900.0, 990.0, 1200.0, 1900.0, 4710.0, 21230.0),
    (1400.0, 1400.0, 1400.0, 1400.0, 1400.0, 1400.0, 1400.0, 1690.0, 2400.0, 5680.0, 24060.0),
    (3760.0, 3760.0, 3760.0, 3760.0, 3760.0, 3760.0, 3150.0, 3280.0, 4020.0, 7700.0, 26590.0),
)
