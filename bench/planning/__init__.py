"""What `plimsoll plan` answers beside the answers of other planners and beside recorded runs."""
