"""The demo: from nothing to a served model, shown step by step."""
