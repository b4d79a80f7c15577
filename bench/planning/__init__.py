"""Results of `plimsoll plan` beside those of other planners and recorded runs."""
