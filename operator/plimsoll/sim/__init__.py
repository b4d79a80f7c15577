"""A fleet in virtual time: the real core decides, a plant that it does not know answers."""
