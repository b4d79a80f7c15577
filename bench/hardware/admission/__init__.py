"""The gateway's gate before one real engine, under more load than it can carry."""
