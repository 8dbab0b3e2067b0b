"""modelopt-spec."""
