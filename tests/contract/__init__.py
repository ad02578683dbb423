"""Every registered strategy and every environment through one suite."""
