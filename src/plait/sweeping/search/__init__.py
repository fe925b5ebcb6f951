"""Which values trials have and which of them go on, as pure functions."""
