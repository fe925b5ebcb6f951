"""What is looked at before a run's first update: its data, its loss, and what forwards keep or write."""
