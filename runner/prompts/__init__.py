"""What chat templates run in: a metered sandbox, and user texts that stay recognisable in it."""
